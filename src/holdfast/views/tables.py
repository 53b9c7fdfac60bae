"""The output of the commands for running jobs: the tables of `ps` and `status`, events and log lines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from holdfast.control.history import delays_of, goodput_of, progress_of, state_of
from holdfast.observe.lifecycle import protection_text
from holdfast.rendezvous.handler import host_label
from holdfast.views.terminal_text import TerminalText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.bounded import Loss
    from holdfast.wire.messages import AgentIdentity, EventRecord, JobSummary, LogLines, NodeSummary

HISTORY_SHOWN = 5
UNREACHED_SHOWN = 10
COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92)
"""Colours of ranks, in turn; see ECMA-48."""


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned lines."""
    words = [[*map(str, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    return "".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in words
    )


def duration(seconds: float | None) -> str:
    """Return a time in at most six characters: `12ms`, `3.4s`, `5m12s`, `3h07m`, `12d04h`."""
    if seconds is None or seconds < 0:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def share(value: float | None) -> str:
    """Return a share as a percentage, `-` if it is unknown."""
    if value is None:
        return "-"
    if 0 < value < 0.0005:
        return "<0.1 %"
    return f"{100 * value:.1f} %" if value < 0.9995 else "100 %"


def loss_text(loss: Loss | None) -> str:
    """Return a loss in few characters: `2.314`, `1.2e-05`, `nan`; `-` if it is unknown."""
    return "-" if loss is None else loss if isinstance(loss, str) else f"{loss:.4g}"


def generation(number: int) -> str:
    """Return the number of a generation, `-` before the first one."""
    return str(number) if number >= 0 else "-"


def job_row(job: JobSummary) -> dict[str, Any]:
    """Return the row of `ps` for a job at a coordinator or on etcd."""
    return {
        "job": job.run_id,
        "state": job.outcome or job.phase,
        "generation": _known(job.generation),
        "nodes": job.present,
        "restarts": f"{job.restarts}/{job.max_restarts}",
    }


def local_job_row(agents: Sequence[AgentIdentity]) -> dict[str, Any]:
    """Return the row of `ps` for a job that has agents on this machine."""
    # The others may be standbys.
    first = max(agents, key=lambda one: (one.generation, one.workers))
    return {
        "job": first.run_id,
        "state": first.state,
        "generation": _known(first.generation),
        "agents": len(agents),
        "workers": sum(one.workers for one in agents),
        "at": first.endpoint or "this host",
        "program": first.program,
        "age": duration(max(one.elapsed_s for one in agents)),
    }


def agent_row(agent: AgentIdentity) -> dict[str, Any]:
    """Return the row of `ps --agents` for an agent on this machine."""
    return {
        "job": agent.run_id,
        "state": agent.state,
        "generation": _known(agent.generation),
        "workers": agent.workers,
        "pid": agent.pid,
        "node": agent.node or host_label(),  # The only node of a job is called like this host.
        "at": agent.endpoint or "this host",
        "program": agent.program,
        "age": duration(agent.elapsed_s),
    }


def _known(number: int) -> int | None:
    return number if number >= 0 else None


class LogPrinter:
    """Prints lines of many ranks, each prefixed with its rank.

    With `escaped`, it escapes workers' control sequences other than colours, which a terminal would execute.
    """

    def __init__(self, *, prefixed: bool, coloured: bool, escaped: bool) -> None:
        self._prefixed, self._coloured, self._escaped = prefixed, coloured, escaped
        self._texts: dict[tuple[int, str], TerminalText] = {}
        self._line_source: tuple[int, str] | None = (
            None  # The source of a line that is not complete yet.
        )

    def show(self, lines: LogLines) -> None:
        text = lines.text
        source = (lines.rank, lines.stream)
        if self._escaped:
            text = self._texts.setdefault(source, TerminalText()).add(text).encode()
        if not text:
            return
        is_whole = text.endswith(b"\n")
        if self._prefixed:
            mark = b"[%d] " % lines.rank
            if self._coloured:
                colour = COLOURS[lines.rank % len(COLOURS)]
                mark = b"\x1b[%dm%b\x1b[0m" % (colour, mark)
            begun = b"" if self._line_source == source else mark
            body = text.removesuffix(b"\n").replace(b"\n", b"\n" + mark)
            text = begun + body + (b"\n" if is_whole else b"")
        if self._line_source not in (None, source):
            text = b"\n" + text
        self._line_source = None if is_whole else source
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


def status_text(job: JobSummary, unreached: Sequence[str] = ()) -> str:
    """Return the state of a job, and a line for each node that sent no report."""
    state = job.outcome or job.phase
    head = f"job {job.run_id!r}: {state}, generation {generation(job.generation)}"
    if job.round >= 0:
        head += f", round {job.round}"
    goodput = goodput_of(one.report for one in job.nodes if one.report is not None)
    name = goodput.name if goodput is not None else "goodput"
    head += f", {name} {share(goodput.share if goodput is not None else None)}"
    lines = [
        head,
        f"nodes {job.members} of {job.min_nodes}:{job.max_nodes}"
        + ("" if job.outcome else f", {job.present} connected"),
        f"restarts {job.restarts} of {job.max_restarts}",
    ]
    lines += delays_of(job)
    lines += _progress_lines(job)
    if job.why:
        lines.append(f"{'reason' if job.outcome else 'last change'}: {job.why}")
    if job.missing and not job.outcome:
        lines.append(protection_text(job.missing))
    rows = [["#", "NODE", "HOST", "STATE", "RANKS", "WORKERS", "STEP", "HEARTBEAT", "RSS"]]
    rows += [_node_row(node, job) for node in sorted(job.nodes, key=_node_order)]
    lines += ["", table(rows).rstrip("\n")]
    if unreached:
        lines += ["", "no report:", *(f"  {line}" for line in unreached[:UNREACHED_SHOWN])]
        if len(unreached) > UNREACHED_SHOWN:
            lines.append(f"  and {len(unreached) - UNREACHED_SHOWN} more")
    if job.causes:
        lines += ["", "restarts:", *(f"  {line}" for line in job.causes[-HISTORY_SHOWN:])]
    if job.history:
        lines += ["", "history:", *(f"  {line}" for line in job.history[-HISTORY_SHOWN:])]
    return "\n".join(lines) + "\n"


def _progress_lines(job: JobSummary) -> list[str]:
    """Return a line about the progress of a job whose workers report its number of steps, or a loss."""
    reports = [node.report for node in job.nodes if node.report is not None]
    found = progress_of(one for report in reports for one in report.workers)
    parts = []
    if found.total > 0:
        step = max(0, found.step_min)
        parts.append(f"step {step:,} of {found.total:,} ({share(min(1.0, step / found.total))})")
        if not job.outcome:
            parts.append(f"ETA {duration(found.eta_s)}")
    if found.loss is not None:
        parts.append(f"loss {loss_text(found.loss)}")
    return [f"progress: {', '.join(parts)}"] if parts else []


def _node_order(node: NodeSummary) -> tuple[bool, int, str]:
    return node.rank < 0, node.rank, node.node


def _node_row(node: NodeSummary, job: JobSummary) -> list[str]:
    """Return the row of a node; after the end of the job, it has no state and no running workers."""
    is_over = bool(job.outcome)
    ranks = "-"
    if node.first_rank >= 0:
        last = node.first_rank + node.size - 1
        ranks = str(node.first_rank) if node.size == 1 else f"{node.first_rank}-{last}"
    workers = node.report.workers if node.report is not None else []
    running = sum(one.state == "running" for one in workers)
    steps = [one.step for one in workers if one.step >= 0]
    ages = [one.heartbeat_age_s for one in workers if one.heartbeat_age_s >= 0]
    rss = sum(one.rss_bytes for one in workers)
    return [
        str(node.rank) if node.rank >= 0 else "-",
        node.node,
        node.host,
        "-" if is_over else state_of(node, job.phase),
        ranks,
        f"{running}/{node.size}" if workers and not is_over else "-",
        (str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}")
        if steps
        else "-",
        f"{max(ages):.1f} s" if ages and not is_over else "-",
        f"{rss / 1e6:.0f} MB" if rss else "-",
    ]


def event_line(event: EventRecord) -> str:
    """Return an event as a line."""
    when = time.strftime("%H:%M:%S", time.localtime(event.wall))
    text = event.text or event.kind.value
    return f"{when} {event.source or 'job'}: {text}"
