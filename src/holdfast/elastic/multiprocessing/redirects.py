"""Redirecting a process's own streams, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.redirects import get_libc, redirect, redirect_stderr, redirect_stdout

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]
