"""A worker that writes many lines to stdout, and then waits to be stopped."""

from __future__ import annotations

import os
import signal
import sys

LINE = (
    b"a line of a log that somebody follows, which is as long as such lines are, about a hundred\n"
)
LINES = 4_096


def main() -> None:
    left, block = int(sys.argv[1]), LINE * LINES
    while left > 0:
        left -= os.write(1, block)
    signal.pause()


if __name__ == "__main__":
    main()
