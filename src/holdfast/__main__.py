"""`python -m holdfast` is the command `holdfast`."""

from __future__ import annotations

import sys

from holdfast.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry())
