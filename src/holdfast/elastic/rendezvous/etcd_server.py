"""An etcd server for this process, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.etcd_server import EtcdServer
from holdfast.etcd.local_etcd import stop_etcd
from holdfast.etcd.runner import hold_port as find_free_port

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]
