"""An etcd server for this process, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.etcd_server import EtcdServer
from holdfast.etcd.process import hold_port as find_free_port
from holdfast.etcd.server import stop_etcd

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]
