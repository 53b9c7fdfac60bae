"""The page of a report is well-formed, self-contained, and safe for any text of workers."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from holdfast.views.report import plots
from holdfast.views.report.html import render
from holdfast.views.report.model import describe
from timelines import Timeline, one_restart

VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'&\x1b]0;title\x07\u202e\ud800\x00"
REFERRING = {"src", "href", "action", "data", "srcset", "poster", "xlink:href", "formaction"}


class Checker(HTMLParser):
    """Records elements that are not closed, references, event handlers and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.references: list[str] = []
        self.scripts = 0
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in REFERRING:
                self.references.append(value or "")
            if name.startswith("on") or name == "style":
                self.faults.append(f"{tag} {name}")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert checker.faults == []
    return checker


def page_of(node: Timeline) -> str:
    return render(describe(node.runs()))


def test_page_is_well_formed_and_self_contained() -> None:
    checker = checked(page_of(one_restart()))
    assert checker.references
    assert {reference[:1] for reference in checker.references} == {"#"}
    assert {reference[1:] for reference in checker.references} <= set(checker.ids)
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.scripts == 1


def test_policy_allows_only_the_dashboards_style_and_script() -> None:
    page = page_of(one_restart())
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    policy = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    for tag in ("style", "script"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"


def test_untrusted_text_is_escaped() -> None:
    node = Timeline(HOSTILE)
    node.run(run_id=HOSTILE, program=HOSTILE)
    node.lines += one_restart(HOSTILE).lines[1:-1]
    node.end(55.0, "error", f"Traceback:\n{HOSTILE}")
    page = page_of(node)
    checker = checked(page)
    assert checker.scripts == 1
    assert "<img" not in page
    assert page.isascii() or all(one.isprintable() or one in "\n\t" for one in page)
    page.encode()


@pytest.mark.parametrize("seconds", [0.0013, 0.04, 0.7, 12.0, 90.0, 3700.0, 1e5, 1e6, 1e8])
def test_labels_of_a_time_axis_differ(seconds: float) -> None:
    labels = [label for _, label in plots.time_ticks(seconds)]
    assert len({*labels}) == len(labels) >= 2


def test_timeline_explains_the_bars_of_nodes() -> None:
    page = page_of(one_restart())
    legend = page.partition('id="scroll"')[2].partition('class="legend"')[2].partition("</div>")[0]
    assert all(f'class="key {name}"' in legend for name in ("g0", "g1", "useful"))


def test_every_outcome_has_a_page() -> None:
    for state in ("succeeded", "failed", "stopped", "left", "error", "standby", "else"):
        node = Timeline()
        node.run()
        node.end(3.0, state, "E: x")
        checked(page_of(node))
