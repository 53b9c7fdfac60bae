"""The state of a job in etcd, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.etcd_backend import EtcdRendezvousBackend, create_backend

__all__ = ["EtcdRendezvousBackend", "create_backend"]
