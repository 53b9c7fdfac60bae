"""The stacks of all Python threads of this process, in words.

Made out of the frames that the interpreter shows, with the threads' names; whoever asks is left
out. It needs the interpreter's lock: a thread that never lets go of it can only be seen from
outside, by `holdfast.control.stacks`.
"""

from __future__ import annotations

import sys
import threading
import traceback

FRAMES_MAX = 200
"""Of one thread, the innermost; a recursion that does not end is not shown to its beginning."""
THREADS_MAX = 500


def stacks_of_this_process() -> str:
    """Return where each thread is, the main one first, the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    numbers = sorted(frames, key=lambda ident: (ident != main, ident))
    parts = []
    for ident in numbers[:THREADS_MAX]:
        frame = frames[ident]
        lines = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES_MAX)
        lines.reverse()
        head = f'Thread {ident:#x} "{names.get(ident, "?")}" (most recent call last):\n'
        parts.append(head + "".join(lines.format()))
    if len(numbers) > THREADS_MAX:
        parts.append(f"... and {len(numbers) - THREADS_MAX} more threads\n")
    return "\n".join(parts) or "no other thread runs Python\n"
