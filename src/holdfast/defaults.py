"""Constants that several packages share."""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""Both sides of a connection, and stored records, must have this version. Any other version is rejected."""

SAME_VERSION = "install the same Holdfast on all nodes"

START_METHODS = ("spawn", "fork", "forkserver")

SHELLS = ("bash", "zsh", "fish", "tcsh")
"""The shells that `holdfast completion` supports."""

SHUTDOWN_S = 30
"""How long workers have between the stop signal and SIGKILL."""

FAILURE_GRACE_S = 10
"""The same after a failure, unless `SHUTDOWN_S` or its replacement is shorter."""

REAP_S = 15.0
"""How long a killed process may take to exit. The kernel needs seconds to tear down a process with much memory
or many GPUs. A process that takes longer than this is in uninterruptible sleep."""

EXIT_BARRIER_S = 300
"""How long an agent whose workers are done waits for the other agents of the job."""

LOG_TAIL_BYTES = 16 << 20
"""How much of each worker's output an agent keeps on disk while the worker has no log files."""

AGENT_SECRETS = (
    "HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE", "HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD",
)  # fmt: skip
"""Variables that authorize an agent for any job. Workers and etcd do not inherit them."""
