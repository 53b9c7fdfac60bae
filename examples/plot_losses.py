"""Draw the log of `elastic_ddp.py` as a picture: the loss, the number of workers, and every restart.

Run it on the log of a job, optionally with a label for a generation:

    python examples/plot_losses.py /tmp/ddp/losses.jsonl losses.svg --label 1="worker killed"

It needs only Python. The picture is an SVG file, which every browser shows.
"""

from __future__ import annotations

import argparse
import json
import math
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 76, 52
COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e", "#7a5195", "#2e8b57")
TICKS = 6
LABEL_LINE = 15  # Pixels between labels that are close to each other.


class Note(NamedTuple):
    """One line of the log."""

    step: int
    loss: float
    generation: int
    world_size: int


def read(path: Path) -> list[Note]:
    """Return the lines of a log."""
    return [Note(**json.loads(line)) for line in path.read_text().splitlines()]


def draw(notes: list[Note], labels: dict[int, str]) -> str:
    """Return the picture: the loss over the steps, a colour for each number of workers.

    `labels` has texts by generation, drawn at its first step.
    """
    paper = Paper(notes)
    sizes = sorted({note.world_size for note in notes})
    colour_of = {size: COLOURS[index % len(COLOURS)] for index, size in enumerate(sizes)}
    parts = [paper.axes()]
    starts = [after for before, after in pairwise(notes) if before.generation != after.generation]
    for number, start in enumerate(starts):
        text = labels.get(start.generation, f"generation {start.generation}")
        parts.append(paper.mark(start.step - 0.5, text, number % 2))
    last: Note | None = None
    for _, group in groupby(notes, lambda note: note.generation):
        points = list(group)
        line = points if last is None else [last, *points]  # From the last point.
        parts.append(paper.line(line, colour_of[points[0].world_size]))
        last = points[-1]
    parts.append(paper.legend([(colour_of[size], workers(size)) for size in sizes]))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def workers(count: int) -> str:
    """Return the number of workers as text."""
    return f"{count} worker" if count == 1 else f"{count} workers"


class Paper:
    """Maps steps and losses to coordinates."""

    def __init__(self, notes: list[Note]) -> None:
        self.steps = max(note.step for note in notes)
        self.tick = round_up(max(note.loss for note in notes) / TICKS)
        self.top = self.tick * math.ceil(max(note.loss for note in notes) / self.tick)

    def x(self, step: float) -> float:
        """Return the x coordinate of a step."""
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps, 1)

    def y(self, loss: float) -> float:
        """Return the y coordinate of a loss."""
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / self.top, 1)

    def axes(self) -> str:
        """Return the axes and grid lines."""
        parts = []
        for index in range(round(self.top / self.tick) + 1):
            at, text = self.y(index * self.tick), f"{index * self.tick:.3g}"
            parts += [
                f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#e6e6e6"/>',
                f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end" fill="#444">{text}</text>',
            ]
        every = max(1, round(round_up(self.steps / TICKS)))
        for step in range(0, self.steps + 1, every):
            at = HEIGHT - BOTTOM + 18
            parts.append(
                f'<text x="{self.x(step)}" y="{at}" text-anchor="middle" fill="#444">{step}</text>'
            )
        middle = (LEFT + WIDTH - RIGHT) / 2
        return "\n".join(
            [
                *parts,
                f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">step</text>',
                f'<text x="{LEFT - 8}" y="{TOP - 14}" text-anchor="end">loss</text>',
            ]
        )

    def line(self, notes: list[Note], colour: str) -> str:
        """Return the curve of one generation."""
        path = "L".join(f"{self.x(note.step)} {self.y(note.loss)}" for note in notes)
        return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'

    def mark(self, step: float, text: str, row: int) -> str:
        """Return a vertical line and a label where the workers restarted."""
        at, above = self.x(step), TOP - 8 - LABEL_LINE * row
        return (
            f'<path d="M{at} {above + 4}V{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="4 3"/>'
            f'<text x="{at}" y="{above}" text-anchor="middle">{escape(text)}</text>'
        )

    def legend(self, entries: list[tuple[str, str]]) -> str:
        """Return the legend."""
        return "\n".join(
            f'<rect x="{LEFT + 110 * index}" y="14" width="18" height="4" fill="{colour}"/>'
            f'<text x="{LEFT + 110 * index + 24}" y="20">{escape(text)}</text>'
            for index, (colour, text) in enumerate(entries)
        )


def round_up(value: float) -> float:
    """Return the next number that is 1, 2 or 5 times a power of ten."""
    power = float(10 ** math.floor(math.log10(value)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def parse_args() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="Draw the losses of a job.")
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--label", action="append", default=[], metavar="GENERATION=TEXT")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    given = dict(label.split("=", 1) for label in args.label)
    labels = {int(generation): text for generation, text in given.items()}
    args.picture.write_text(draw(read(args.log), labels))
