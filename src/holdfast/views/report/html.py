"""A report as one HTML file that contains its styles, script and plots.

Text from a log directory is untrusted: `shown` makes it printable and escapes it, and the content
security policy of the page allows only its own style and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import os
from html import escape
from typing import TYPE_CHECKING

from holdfast import __version__
from holdfast.control.history import ENDING_STAGES, STARTING_STAGES, Stage
from holdfast.numa.affinity import format_ranges
from holdfast.printable import one_line, visible
from holdfast.processes.failures.tracebacks import readable_lines
from holdfast.views.report import plots
from holdfast.views.report.plots import duration, percent
from holdfast.views.stages import MEANINGS
from holdfast.views.tables import share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.control.step_rates import StepProgress
    from holdfast.views.report.model import (
        FailureEntry,
        GenerationEntry,
        NodeEntry,
        Report,
        SpanEntry,
    )

LANES_SHOWN = 32
"""The maximum number of nodes drawn. If there are more, failed and lost nodes come first."""
ROWS_SHOWN = 500
SPANS_SHOWN = 4000
LANE_HEIGHT = 26
OPEN_FAILURES = 1
"""Failures whose details are expanded."""
VERDICTS = {
    "succeeded": "Succeeded",
    "failed": "Failed",
    "stopped": "Stopped",
    "left": "Left",
    "standby": "Standby",
    "error": "Error",
    "running": "Running",
    "lost": "Lost",
}


def shown(text: str) -> str:
    """Return untrusted text as one line of HTML."""
    return escape(one_line(text))


def block(text: str) -> str:
    """Return untrusted lines as HTML, without colours and overwritten progress bars."""
    return escape(visible("\n".join(readable_lines(text.strip("\n")))))


def render(report: Report) -> str:
    """Return the page."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    sections = [
        ("timeline", "Timeline", _timeline(report)),
        ("time", "Time", _where_the_time_went(report)),
        ("failures", "Failures", _failures(report)),
        ("generations", "Generations", _generations(report)),
        ("progress", "Progress", _progress(report)),
        ("output", "Last output", _tails(report)),
        ("nodes", "Nodes", _nodes(report)),
        ("about", "About this report", _about(report)),
    ]
    sections = [one for one in sections if one[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    bodies = "".join(
        f'<section id="{name}"><h2>{title}</h2>{body}</section>\n' for name, title, body in sections
    )
    title = shown(f"{report.program or report.run_id}: {report.outcome.state}")
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{style}</style></head>\n"
        f'<body><a class="skip" href="#main">Skip to the report</a>\n{_header(report)}\n'
        f'<nav aria-label="Sections"><div>{links}</div></nav>\n<main id="main">{_figures(report)}\n{bodies}'
        f"</main>\n<footer>Made by holdfast report {escape(__version__)}</footer>\n"
        f"<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# The head: how the job ended, and why.


def _header(report: Report) -> str:
    state = report.outcome.state
    began = report.began.replace("T", " ").partition(".")[0]
    over = [f"run id {shown(report.run_id)}", f"began {escape(began)} UTC"]
    return (
        f'<header><div><div class="over">{"".join(f"<span>{one}</span>" for one in over)}</div>'
        f"<h1>{shown(report.program or 'A job')}</h1>"
        f'<div class="verdict {state}"><span class="pill {state}">{VERDICTS[state]}</span>'
        f'<p class="why">{shown(report.outcome.reason)}</p></div></div></header>'
    )


def _figures(report: Report) -> str:
    is_bound = report.goodput is not None and report.measure == "running"
    good = "goodput (upper bound)" if is_bound else "goodput"
    nodes = {name for one in report.generations[-1:] for name in one.nodes}
    workers = f"{len(nodes)} &times; {report.world_size // len(nodes)}" if nodes else "0"
    if nodes and report.world_size % len(nodes):
        workers = f"{len(nodes)} / {report.world_size}"
    failed = sum(not one.consequence for one in report.failures)
    figures = [
        (_share(report.goodput), good),
        (duration(report.duration_s), "duration"),
        (f"{report.restarts} of {report.max_restarts}", "restarts charged"),
        (
            str(len(report.generations)),
            "generation" if len(report.generations) == 1 else "generations",
        ),
        (str(failed), "worker failed" if failed == 1 else "workers failed"),
        (workers, "nodes &times; workers at the end"),
    ]
    return (
        '<div class="figures">'
        + "".join(
            f'<div class="figure"><b>{value}</b><span>{text}</span></div>'
            for value, text in figures
        )
        + "</div>"
    )


def _share(value: float | None) -> str:
    return escape(share(value)) if value is not None else "&ndash;"


# The time in each stage.


def _where_the_time_went(report: Report) -> str:
    how = (
        "Workers report steps: <em>useful</em> is the time in which they made steps that no later "
        "generation repeated."
        if report.measure == "progress"
        else "Workers do not report steps (<code>holdfast.worker.progress</code>): <em>useful</em> is "
        "the time in which all workers ran. The report cannot tell which part of it was repeated after a "
        "restart, so this is an upper bound."
    )
    if len(report.nodes) > 1:
        how += (
            " Goodput is computed from the records of the nodes in the newest generation, the stages "
            "below from those of all nodes."
        )
    place = 0.0
    bars = []
    for cost in report.costs:
        bars.append(
            f'<rect class="{cost.stage}" x="{percent(place, 1)}" width="{percent(cost.share, 1)}" '
            f'height="100%"><title>{cost.stage}: {_share(cost.share)}</title></rect>'
        )
        place += cost.share
    rows = []
    for cost in report.costs:
        if not cost.seconds:
            continue
        meaning = MEANINGS[cost.stage]
        if cost.stage is Stage.USEFUL and report.measure == "running":
            meaning = "all workers ran"
        rows.append(
            f'<tr><td class="k"><span class="key {cost.stage}"></span>{cost.stage}</td><td>{meaning}</td>'
            f'<td class="n">{duration(cost.seconds)}</td><td class="n">{_share(cost.seconds / report.duration_s)}</td></tr>'
        )
    return (
        f'<p class="about">{how}</p><svg class="bar" role="img"><title>Shares of the time</title>'
        f'{"".join(bars)}</svg><div class="wide"><table><thead><tr><th>stage</th><th>the job</th>'
        f'<th class="n">time</th><th class="n">share</th></tr></thead><tbody>{"".join(rows)}'
        "</tbody></table></div>"
    )


# The timeline.


def _timeline(report: Report) -> str:
    whole = report.duration_s
    if not report.spans or whole <= 0:
        return ""
    lanes = _lanes(report)
    # A restarted agent has the lane of its predecessor, which had the same node id.
    places = {name: at for at, name in enumerate(dict.fromkeys(one.name for one in lanes), 1)}
    height = LANE_HEIGHT * (len(places) + 1) + 22
    rows = [_lane(0)]
    rows += [_span(one, whole) for one in report.spans[:SPANS_SHOWN]]
    rows += [_number(one, whole) for one in report.generations if _has_room(one, whole)]
    rows += [_lane(at) for at in places.values()]
    for part in report.node_spans:
        if part.node in places:
            y = LANE_HEIGHT * places[part.node] + 5
            title = f"{shown(part.node)}: generation {part.generation}, {_span_text(part.from_s, part.to_s)}"
            rows.append(
                f'<rect class="g{part.generation % 2}" x="{percent(part.from_s, whole)}" y="{y}" '
                f'width="{percent(part.to_s - part.from_s, whole)}" height="{LANE_HEIGHT - 10}">'
                f"<title>{title}</title></rect>"
            )
    rows += [
        _failure_mark(node, places[node.name], report) for node in lanes if node.state == "lost"
    ]
    ticks = "".join(
        f'<line x1="{percent(at, whole)}" x2="{percent(at, whole)}" y1="0" y2="{height - 18}"/>'
        f'<text x="{percent(at, whole)}" y="{height - 4}">{text}</text>'
        for at, text in plots.time_ticks(whole)
    )
    names = "".join(
        f'<div title="{shown(name)} on {shown(host)}">{shown(name)}</div>'
        for name, host in {node.name: node.host for node in lanes}.items()
    )
    used = {one.stage for one in report.spans}
    legend = "".join(
        f'<span><span class="key {kind}"></span>{kind}</span>' for kind in MEANINGS if kind in used
    )
    if report.node_spans:
        legend += (
            '<span><span class="key g0"></span><span class="key g1"></span>'
            "the workers of a node, in alternating colours for each generation</span>"
        )
    if any(node.state == "lost" for node in lanes):
        legend += '<span><span class="lost">&times;</span>the node was lost</span>'
    hidden = len(report.nodes) - len(lanes)
    more = f'<p class="about">{hidden} more nodes are not drawn.</p>' if hidden else ""
    return (
        '<div class="zoom"><button type="button" data-zoom="in">Zoom in</button>'
        '<button type="button" data-zoom="out">Zoom out</button>'
        '<button type="button" data-zoom="all">All</button><span>Keys: + &minus; 0</span></div>'
        f'<div class="lanes"><div class="names"><div>job</div>{names}</div>'
        f'<div class="scroll" id="scroll" tabindex="0" data-seconds="{whole}" role="region" '
        f'aria-label="Timeline of {len(report.generations)} generations on {len(lanes)} nodes">'
        f'<svg height="{height}"><g class="ticks">{ticks}</g>{"".join(rows)}</svg></div></div>'
        f'<div class="legend">{legend}</div>{more}'
    )


def _lanes(report: Report) -> list[NodeEntry]:
    """Return the nodes to draw, in the order of their ranks."""
    nodes = report.nodes
    if len(nodes) > LANES_SHOWN:
        failing = {one.node for one in report.failures if not one.consequence}
        dull = sorted(nodes, key=lambda one: (one.state == "succeeded", one.name not in failing))
        chosen = {id(one) for one in dull[:LANES_SHOWN]}
        nodes = [one for one in nodes if id(one) in chosen]
    return nodes


def _lane(at: int) -> str:
    y = LANE_HEIGHT * at + 3
    return f'<rect class="lane" x="0" y="{y}" width="100%" height="{LANE_HEIGHT - 6}"/>'


def _span(one: SpanEntry, whole: float) -> str:
    where = f"generation {one.generation}: " if one.generation is not None else ""
    title = f"{where}{one.stage}, {_span_text(one.from_s, one.to_s)}"
    rect = (
        f'<rect class="{one.stage}" x="{percent(one.from_s, whole)}" y="3" '
        f'width="{percent(one.to_s - one.from_s, whole)}" height="{LANE_HEIGHT - 6}">'
        f"<title>{title}</title></rect>"
    )
    if one.generation is None:
        return rect
    return f'<a href="#generation-{one.generation}" tabindex="-1">{rect}</a>'


def _has_room(one: GenerationEntry, whole: float) -> bool:
    return (one.ended_s - one.started_s) / whole > 0.03


def _number(one: GenerationEntry, whole: float) -> str:
    x = percent((one.started_s + one.ended_s) / 2, whole)
    return f'<text class="on" x="{x}" y="17" text-anchor="middle">{one.number}</text>'


def _failure_mark(node: NodeEntry, at: int, report: Report) -> str:
    own = (one for one in report.node_spans if one.node == node.name)
    ends = [part.to_s for part in own if part.from_s <= node.ended_s]
    end = max(ends, default=node.ended_s)
    x, y = percent(end, report.duration_s), LANE_HEIGHT * at
    left = -14 if end > 0.98 * report.duration_s else -5  # It must stay inside.
    return (
        f'<svg x="{x}" y="{y}" width="14" height="26" overflow="visible">'
        f'<path class="cross" d="M{left} 8l10 10M{left + 10} 8l-10 10"/><title>{shown(node.name)} was lost</title></svg>'
    )


def _span_text(begun: float, end: float) -> str:
    return f"{duration(end - begun)} from {duration(begun)}"


# Generations.


def _generations(report: Report) -> str:
    if not report.generations:
        return '<p class="about">No generation was started.</p>'
    stages = (*STARTING_STAGES, *ENDING_STAGES)
    rows = []
    for one in report.generations[-ROWS_SHOWN:]:
        steps = ""
        if one.last_step is not None:
            steps = f"{one.first_step} to {one.last_step}"
        rows.append(
            f'<tr id="generation-{one.number}"><td><a href="#timeline" data-from="{one.started_s}" '
            f'data-to="{one.ended_s}" title="Show it in the timeline">{one.number}</a></td>'
            f'<td class="n">{duration(one.started_s)}</td>'
            f'<td class="n">{len(one.nodes)} &times; {one.world_size // max(1, len(one.nodes))}</td>'
            + "".join(
                f'<td class="n">{_seconds(getattr(one, f"{name}_s"))}</td>' for name in stages
            )
            + f'<td class="n">{duration(one.useful_s)}</td><td class="n">'
            f'{duration(one.repeated_s) if one.repeated_s else "&ndash;"}</td><td class="n">{steps or "&ndash;"}</td>'
            f'<td class="why"><span class="pill {one.end}">{one.end}</span> '
            f"{shown(one.end_reason)}</td></tr>"
        )
    heads = ("started", "nodes &times; workers", *stages, "useful", "repeated", "steps")
    return (
        f'<p class="about">The stages that led to each generation ({", ".join(STARTING_STAGES)}), its '
        f"useful and repeated time, and the stages that ended it ({', '.join(ENDING_STAGES)}).</p>"
        '<div class="wide"><table><thead><tr><th>#</th>'
        + "".join(f'<th class="n">{head}</th>' for head in heads)
        + f"<th>end</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _seconds(value: float | None) -> str:
    return "&ndash;" if value is None else duration(value)


# Failures.


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    causes = [one for one in report.failures if not one.consequence]
    others = [one for one in report.failures if one.consequence]
    # The failure that ended the job is expanded.
    opened = causes[-1:] if report.outcome.state == "failed" else causes[:OPEN_FAILURES]
    text = "".join(_failure(one, is_open=one in opened) for one in causes)
    if others:
        inner = "".join(_failure(one, is_open=False) for one in others)
        text += (
            f"<details><summary>{len(others)} more workers exited because the others were "
            f"stopped</summary><div>{inner}</div></details>"
        )
    return text


def _failure(one: FailureEntry, *, is_open: bool) -> str:
    why = one.detail or one.message or one.traceback.strip().rpartition("\n")[2]
    facts = {
        "worker": f"rank {one.rank} (local rank {one.local_rank}), pid {one.pid}",
        "node": f"{one.node} on {one.host}" if one.node else one.host,
        "when": f"{duration(one.at_s)} after the start, in generation {one.generation}",
        "ending": one.ending,
        "reason": one.detail,
    }
    listed = "".join(
        f"<dt>{name}</dt><dd>{shown(value)}</dd>" for name, value in facts.items() if value
    )
    texts = [("Message", one.message), ("Traceback", one.traceback), ("Stacks", one.stacks)]
    if one.stderr_tail.strip() != one.traceback.strip():
        texts.append(("The end of stderr", one.stderr_tail))
    bodies = "".join(_pre(title, text) for title, text in texts if text.strip())
    end = shown(f": {why.strip().partition(chr(10))[0]}") if why.strip() else ""
    return (
        f"<details{' open' if is_open else ''}><summary><strong>rank {one.rank}</strong> "
        f'<span class="dim">generation {one.generation}, {duration(one.at_s)}</span> '
        f'{shown(one.ending)}{end}</summary><div><dl class="facts">{listed}</dl>{bodies}</div></details>'
    )


def _pre(title: str, text: str) -> str:
    return f'<h4>{title}</h4><pre tabindex="0">{block(text)}</pre>'


# Progress.


def _progress(report: Report) -> str:
    found = report.progress
    if found is None:
        return ""
    whole = report.duration_s
    few = found.reporting <= plots.COLOURS
    is_all = found.reporting == len(found.ranks)
    low_step, high_step = _range_of_steps(found)
    tops = sorted(one for one in found.rate_max if one is not None)
    # Rates of very short periods can be outliers, which are cut off.
    high_rate = plots.axis_end(1.05 * tops[int(0.99 * (len(tops) - 1))] if tops else 1.0)
    steps, rates = (
        _lines(found, "steps", low_step, high_step),
        _lines(found, "rates", 0.0, high_rate),
    )
    if not is_all:
        steps.insert(
            0, _path("band", plots.band(found.step_min, found.step_max, low_step, high_step))
        )
        rates.insert(0, _path("band", plots.band(found.rate_min, found.rate_max, 0.0, high_rate)))
        rates.append(_path("c0", plots.line(found.rate_median, 0.0, high_rate)))
    marks = [one.started_s for one in report.generations[1:] if one.started_s < whole]
    drawn = [
        plots.plot(title=title, paths=paths, low=low, high=high, seconds=whole, marks=marks)
        for title, paths, low, high in (
            ("Steps over time, a line for each rank", steps, low_step, high_step),
            ("Steps per second over time, a line for each rank", rates, 0.0, high_rate),
        )
    ]
    key = "".join(
        f'<span><span class="key c{at}"></span>rank {one.rank}</span>'
        for at, one in enumerate(found.ranks)
        if few
    )
    if not is_all:
        key = (
            f'<span><span class="key c0"></span>the range of all {found.reporting} ranks, and their '
            'median rate</span><span><span class="key c1"></span>the slowest ranks</span>'
        )
    elif not few:
        key = (
            '<span><span class="key c0"></span>each rank</span>'
            '<span><span class="key c1"></span>the slowest</span>'
        )
    legend = f'<div class="legend">{key}</div>'
    heat = ""
    if found.reporting > 1:
        levels = zip(
            ("h1", "h2", "h3", "h4", "h5"),
            ("as fast as the others", "from 75 %", "from 50 %", "from 25 %", "slower or stalled"),
            strict=True,
        )
        shades = "".join(
            f'<span><span class="key {name}"></span>{text}</span>' for name, text in levels
        )
        per_row = "" if is_all else " A row has several ranks, and shows the slowest."
        heat = (
            f'<h3>Slow ranks over time</h3><p class="about">The rate of each rank relative to '
            f"the median rate at that time.{per_row}</p>"
            + plots.heat_map(
                title="Rates relative to the median, a row for each rank",
                rows=found.heat,
                names=found.heat_ranks,
                seconds=whole,
            )
            + f'<div class="legend">{shades}</div>{_slowest(found)}'
        )
    return (
        f'<p class="about">{found.reporting} ranks reported steps with '
        "<code>holdfast.worker.progress</code>. Dashed lines mark the starts of generations.</p>"
        f"<h3>Steps</h3>{drawn[0]}<h3>Steps per second</h3>{drawn[1]}{legend}{heat}"
    )


def _range_of_steps(found: StepProgress) -> tuple[float, float]:
    """Return the range of the axis of steps: from 0, unless all steps are far above it."""
    low = min((one for one in found.step_min if one is not None), default=0)
    high = max((one for one in found.step_max if one is not None), default=1)
    if 0 <= low < 0.5 * high:
        return 0.0, plots.axis_end(high)
    return float(low), float(max(high, low + 1))


def _lines(found: StepProgress, what: str, low: float, high: float) -> list[str]:
    """Return the line of each rank, the slowest last, so that they are on top."""
    few = found.reporting <= plots.COLOURS
    is_all = found.reporting == len(found.ranks)
    worst = {one.rank for one in (found.slowest[:1] if is_all else found.slowest)}
    lines = []
    for at, one in enumerate(found.ranks):
        name = f"c{at}" if few else "c1" if one.rank in worst else "c0 many"
        lines.append((name == "c1", _path(name, plots.line(getattr(one, what), low, high))))
    return [path for _, path in (lines if few else sorted(lines, key=lambda line: line[0]))]


def _path(name: str, steps: str) -> str:
    return f'<path class="{name}" d="{steps}"/>'


def _slowest(found: StepProgress) -> str:
    rows = "".join(
        f'<tr><td>{one.rank}</td><td>{shown(one.node)}</td><td class="n">{one.rate:.3g}</td>'
        f'<td class="n">{one.last_step}</td><td class="n">{one.behind or "&ndash;"}</td>'
        f'<td class="n">{duration(one.last_step_s)}</td></tr>'
        for one in found.slowest
    )
    return (
        '<h3>The slowest ranks at the end</h3><div class="wide"><table><thead><tr><th>rank</th><th>node</th>'
        '<th class="n">steps per second</th><th class="n">last step</th><th class="n">behind</th>'
        f'<th class="n">when</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


# The rest.


def _tails(report: Report) -> str:
    return "".join(
        f'<details><summary>rank {one.rank} <span class="dim">{one.stream}, {shown(one.node)}</span>'
        f'</summary><div><pre tabindex="0">{block(one.text)}</pre></div></details>'
        for one in report.tails
        if one.text.strip()
    )


def _nodes(report: Report) -> str:
    rows = []
    for one in report.nodes[:ROWS_SHOWN]:
        ahead = one.clock_ahead_s
        clock = (
            "unknown" if ahead is None else "&ndash;" if abs(ahead) < 1e-3 else f"{ahead:+.3f} s"
        )
        rows.append(
            f"<tr><td>{shown(one.name)}</td><td>{shown(one.host)}</td>"
            f'<td><span class="pill {escape(one.state)}">{shown(one.state)}</span> {shown(one.reason)}</td>'
            f'<td class="n">{duration(one.began_s)}</td><td class="n">{duration(one.ended_s)}</td>'
            f"<td>{_ranges_text(one.generations)}</td><td>{escape(one.ranks)}</td>"
            f'<td class="n">{clock}</td></tr>'
        )
    heads = ("node", "host", "end")
    return (
        '<div class="wide"><table><thead><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + '<th class="n">from</th><th class="n">to</th><th>generations</th><th>ranks at the end</th>'
        f'<th class="n">clock ahead</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _ranges_text(numbers: Iterable[int]) -> str:
    return escape(format_ranges(numbers)) or "none"


def _about(report: Report) -> str:
    facts = "".join(
        f"<dt>{shown(name)}</dt><dd>{shown(value)}</dd>"
        for name, value in report.environment.items()
        if value
    )
    folders = "".join(f"<dd><code>{shown(one.folder)}</code></dd>" for one in report.nodes[:16])
    notes = "".join(f"<li>{shown(note)}</li>" for note in report.notes)
    listed = f'<ul class="notes">{notes}</ul>' if notes else ""
    return f'<dl class="facts">{facts}<dt>folders</dt>{folders}</dl>{listed}'
