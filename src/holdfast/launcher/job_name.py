"""The default name of a job that runs on one node: program and time of day, `train-1142`.

While the job runs, it reserves its name for its user on this machine, as agents reserve node ids
(`rendezvous.node_names`). A second job that would have the same name is called `train-1142-2`.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEL_CHARS_MAX = 40
TRIES_MAX = 1_000


@contextmanager
def reserved_job_name(program: str) -> Iterator[str]:
    """Return a name that no other running job of this user on this machine has until the context ends."""
    stem = default_job_name(program)
    for number in range(1, TRIES_MAX):
        name = stem if number == 1 else f"{stem}-{number}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
            try:
                holder.bind(f"\0holdfast-job-{os.geteuid()}-{name}")
            except OSError as problem:
                if problem.errno == errno.EADDRINUSE:
                    continue
            yield name
            return
    yield f"{stem}-{os.urandom(3).hex()}"


def default_job_name(program: str) -> str:
    """Return the name of a job that starts now, if no other job has it."""
    return f"{label_of(program)}-{time.strftime('%H%M')}"


def label_of(program: str) -> str:
    """Return a script, a module, a command or a function as part of a name: `train` for `src/train.py`."""
    name = os.path.basename(program)
    stem, extension = os.path.splitext(name)
    if os.path.sep in program or extension in (".py", ".sh"):
        name = stem
    elif all(part.isidentifier() for part in name.split(".")):
        name = name.rpartition(".")[2]  # A module.
    kept = "".join(one if one.isascii() and (one.isalnum() or one == "_") else "-" for one in name)
    return kept.strip("-")[:LABEL_CHARS_MAX] or "job"
