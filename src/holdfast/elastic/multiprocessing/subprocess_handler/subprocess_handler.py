"""The handler of one command's process under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.processes.workers.group import SubprocessHandler

__all__ = ["SubprocessHandler"]
