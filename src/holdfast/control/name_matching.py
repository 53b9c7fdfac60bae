"""Finds the job or the node that a user means: by its name, by a unique prefix, or by a node's number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.printable import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.wire.messages import JobSummary

NAMES_SHOWN = 10


def listed(names: Iterable[str]) -> str:
    """Return the first names as text."""
    first = sorted(names)
    more = ", ..." if len(first) > NAMES_SHOWN else ""
    return ", ".join(map(quoted, first[:NAMES_SHOWN])) + more


def match_name(text: str, names: Iterable[str], what: str) -> str:
    """Return the name that is equal to the text, or the only one that begins with it; empty if there is none.

    `what` is the word for several of them, for the message if there is more than one.
    """
    known = {*names}
    if text in known:
        return text
    found = [name for name in known if text and name.startswith(text)]
    if len(found) > 1:
        raise UsageError(f"{text!r} could be one of {len(found)} {what}: {listed(found)}")
    return found[0] if found else ""


def match_node(text: str, job: JobSummary) -> str:
    """Return the node that the text means, or all nodes of a host; the text itself if there is none.

    It is a node id, a host, the number of a node in its round, or the beginning of an id or a host.
    """
    hosts = {one.host for one in job.nodes if one.host}
    ids = {one.node for one in job.nodes}
    if text in ids or text in hosts:
        return text
    if text.isascii() and text.isdigit():
        numbered = [one.node for one in job.nodes if one.rank == int(text)]
        if numbered:
            return numbered[0]
    return match_name(text, ids, "nodes") or match_name(text, hosts, "hosts") or text
