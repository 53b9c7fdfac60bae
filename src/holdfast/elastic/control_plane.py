"""The control plane under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.control.socket_file import VARIABLE as TORCH_WORKER_SERVER_SOCKET
from holdfast.control.worker_entry import worker_main

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]
