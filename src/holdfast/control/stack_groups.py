"""Groups the stacks of many workers by the innermost frame of their main threads."""

from __future__ import annotations

import os
import re

from holdfast.numa.affinity import format_ranges
from holdfast.printable import one_line

FRAME_CHARS_MAX = 200


class StackGroup:
    """Workers whose main threads are in the same frame; `text` has the stacks of the first one."""

    def __init__(self, frame: str) -> None:
        self.frame = frame
        self.ranks: list[int] = []
        self.text = ""

    @property
    def ranks_text(self) -> str:
        """The ranks in short: `rank 7`, or `31 ranks (0-6, 8-31)`."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        listed = format_ranges(self.ranks).replace(",", ", ")
        return f"{len(self.ranks)} ranks ({listed})"


def grouped(stacks: list[tuple[int, str]]) -> list[StackGroup]:
    """Return the groups, the largest first."""
    groups: dict[str, StackGroup] = {}
    for rank, text in sorted(stacks):
        frame = innermost_frame(text)
        group = groups.setdefault(frame, StackGroup(frame))
        group.ranks.append(rank)
        group.text = group.text or text
    return sorted(groups.values(), key=lambda group: (-len(group.ranks), group.ranks))


def innermost_frame(text: str) -> str:
    """Return the innermost frame of the main thread: `all_reduce, train.py:88`.

    py-spy writes `all_reduce (lib/train.py:88)`, Python itself `File "lib/train.py", line 88 in
    all_reduce`. For any other text, return its first line.
    """
    main = text.partition('"MainThread"')[2] or text.partition("Current thread")[2] or text
    found = re.search(r"^ +(\S.*) \((.+):(\d+)\)$", main, re.MULTILINE)
    if found:
        function, path, line = found.groups()
    else:
        found = re.search(r'File "(.+)", line (\d+) in (.+)', main)
        if not found:
            first = text.strip().partition("\n")[0]
            return one_line(first, FRAME_CHARS_MAX) or "unknown"
        path, line, function = found.groups()
    return f"{function}, {os.path.basename(path)}:{line}"
