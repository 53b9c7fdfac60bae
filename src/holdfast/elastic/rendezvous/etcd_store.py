"""A store in etcd, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.etcd.etcd_store import EtcdStore

__all__ = ["EtcdStore"]
