"""Record `make demo` in a terminal and write the recording as an animated SVG.

The picture in the README is made this way:

    python docs/assets/record_demo.py docs/assets/demo.svg

The recording needs no other program: the demo runs on a pseudo-terminal, and each line of its output
becomes a line of text in the picture that appears at the time at which it was printed.
"""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import sys
import time
from fcntl import ioctl
from html import escape
from pathlib import Path
from termios import TIOCSWINSZ
from typing import NamedTuple

COMMAND = "make demo"
COLUMNS, ROWS = 96, 26
TYPING_S, HOLD_S = 1.5, 6.0  # Before the first line, and after the last.
FONT_PX, CHAR_PX, LINE_PX, MARGIN_PX, BAR_PX = 14, 8.43, 19, 16, 28
BACKGROUND, FOREGROUND, BAR = "#0d1117", "#c9d1d9", "#21262d"
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff"}
ESCAPE = re.compile(r"\x1b\[([\d;]*)m")
FOLDER = re.compile(r"file://\S+/")


class Line(NamedTuple):
    """One line of the recording, and when it was printed, in seconds."""

    text: str
    at: float


def record(command: str) -> list[Line]:
    """Run a command on a pseudo-terminal and return its lines with their times."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", command])
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, lines, rest = time.monotonic(), [], b""
    while True:
        select.select([terminal], [], [])
        at = time.monotonic() - began
        try:
            data = os.read(terminal, 65536)
        except OSError:  # The command closed the terminal.
            break
        *whole, rest = (rest + data).split(b"\n")
        lines += [Line(line.decode(errors="replace").rstrip("\r"), at) for line in whole]
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"{command} failed with exit code {code}")
    return lines


def spans(text: str, style: str) -> tuple[str, str]:
    """Turn the colours of a line into SVG; return also the style with which the next line begins."""
    parts = []
    for index, part in enumerate(ESCAPE.split(text)):
        if index % 2:
            bold = ' font-weight="bold"' if part == "1" else ""
            style = f' fill="{COLOURS[part]}"' if part in COLOURS else bold
        elif part:
            parts.append(f"<tspan{style}>{escape(part)}</tspan>" if style else escape(part))
    return "".join(parts), style


def draw(command: str, lines: list[Line]) -> str:
    """Return the recording as an animated SVG; without animations it shows the last screen."""
    first = lines[0].at
    rows = [Line(f"\x1b[32m$\x1b[0m {command}", 0.0)]
    rows += [Line(line.text, TYPING_S + line.at - first) for line in lines]
    length = rows[-1].at + HOLD_S
    width, height = COLUMNS * CHAR_PX + 2 * MARGIN_PX, ROWS * LINE_PX + 2 * MARGIN_PX + BAR_PX
    rules, texts, steps, style = [], [], {0.0: 0}, ""
    for number, row in enumerate(rows):
        percent = 100 * row.at / length
        steps[percent] = max(0, number + 1 - ROWS) * -LINE_PX
        if number:
            rules.append(
                f"@keyframes l{number}{{0%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}}}"
                f".l{number}{{animation-name:l{number}}}"
            )
        y = number * LINE_PX + FONT_PX
        inside, style = spans(row.text, style)
        texts.append(f'<text y="{y}" class="l{number}">{inside}</text>')
    end = max(0, len(rows) - ROWS) * -LINE_PX
    moves = "".join(f"{at:.2f}%{{transform:translateY({to}px)}}" for at, to in steps.items())
    rule = (
        f"text,g.screen{{animation-duration:{length:.2f}s;animation-iteration-count:infinite;"
        f"animation-timing-function:step-end}}"
        f"text{{font:{FONT_PX}px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
        f"fill:{FOREGROUND};white-space:pre}}"
        f"g.screen{{transform:translateY({end}px);animation-name:scroll}}"
        f"@keyframes scroll{{{moves}100%{{transform:translateY({end}px)}}}}"
        f"{''.join(rules)}@media(prefers-reduced-motion){{text,g.screen{{animation:none}}}}"
    )
    lights = "".join(
        f'<circle cx="{20 + 18 * index}" cy="{BAR_PX / 2}" r="5.5" fill="{colour}"/>'
        for index, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    inner = height - BAR_PX - 2 * MARGIN_PX
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
                f'width="{width:.0f}" height="{height}" role="img">'
            ),
            f"<title>A recording of {escape(command)}</title>",
            f"<style>{rule}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
            (
                f'<path d="M0 {BAR_PX}V8a8 8 0 0 1 8-8H{width - 8:.0f}a8 8 0 0 1 8 8V{BAR_PX}Z" '
                f'fill="{BAR}"/>{lights}'
            ),
            (
                f'<svg x="{MARGIN_PX}" y="{BAR_PX + MARGIN_PX}" width="{width - 2 * MARGIN_PX:.0f}" '
                f'height="{inner}"><g class="screen">'
            ),
            *texts,
            "</g></svg></svg>",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/assets/record_demo.py PICTURE.svg")
    shown = [
        Line(FOLDER.sub("file:///home/me/holdfast/build/", line.text), line.at)
        for line in record(COMMAND)
    ]
    Path(sys.argv[1]).write_text(draw(COMMAND, shown) + "\n")
