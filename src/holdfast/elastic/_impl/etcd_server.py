"""An etcd server for this program, with TorchElastic's name, host (`localhost`) and client."""

from __future__ import annotations

from holdfast.elastic._impl.etcd_v2_client import DEFAULT_READ_TIMEOUT_S, EtcdV2Client
from holdfast.errors import UsageError
from holdfast.etcd import local_etcd
from holdfast.etcd.etcd_settings import EtcdSettings


class EtcdServer(local_etcd.LocalEtcd):
    """Starts and stops an etcd; any thread may call it."""

    def __init__(self, data_dir: str | None = None) -> None:
        super().__init__(data_dir)
        self._host = "localhost"

    def get_client(self) -> EtcdV2Client:
        """Return a client of this server, which the caller must close."""
        if self._port < 0:
            raise UsageError("this etcd is not running yet", hint="call start()")
        return EtcdV2Client(
            EtcdSettings(endpoints=((self._host, self._port),), call_s=DEFAULT_READ_TIMEOUT_S)
        )
