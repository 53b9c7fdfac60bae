"""The rendezvous on etcd by its legacy names, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
    create_rdzv_handler,
)

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]
