"""The control plane under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.worker_handlers import (
    Request,
    Response,
    handler_names,
    register_handler,
)
from holdfast.elastic._impl.worker_main import worker_main
from holdfast.processes.worker_socket import VARIABLE as TORCH_WORKER_SERVER_SOCKET

__all__ = [
    "TORCH_WORKER_SERVER_SOCKET",
    "Request",
    "Response",
    "handler_names",
    "register_handler",
    "worker_main",
]
