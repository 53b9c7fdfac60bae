"""What this machine may refuse a launch beside the start of workers, told in one line.

`holdfast.processes.starting` speaks for the start itself and knows the limits of this machine;
this is for all around it: the keeper, the agent's own descriptors, the disk.
"""

from __future__ import annotations

import errno

from holdfast.errors import EnvironmentProblem
from holdfast.processes.starting import HINTS

# What a person can do about it, by the error that the kernel gives.
REMEDIES = HINTS | {
    errno.ENOSPC: "free space on the disk, or name another folder with --log-dir",
    errno.EDQUOT: "free space on the disk, or name another folder with --log-dir",
    errno.EROFS: "name a folder that can be written with --log-dir",
}


def refusal(problem: OSError) -> EnvironmentProblem | None:
    """Return what the machine refused, or None for an error that is not about its limits."""
    remedy = REMEDIES.get(problem.errno or 0)
    if remedy is None:
        return None
    where = f"{problem.filename}: " if problem.filename else ""
    return EnvironmentProblem(
        f"the workers could not be run: {where}{problem.strerror}", hint=remedy
    )
