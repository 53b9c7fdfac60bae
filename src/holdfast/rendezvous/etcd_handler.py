"""The rendezvous on etcd: `--rdzv-backend etcd`, and `etcd-v2` as another name for it.

To an agent it is the rendezvous at a coordinator, without one: the nodes' leases say who is there,
one of the nodes leads, and if it is lost another does after one lease.
"""

from __future__ import annotations

import math
import time

from holdfast import messages
from holdfast.core.membership import Times
from holdfast.core.news import Role
from holdfast.rendezvous import config
from holdfast.rendezvous.coordinated import CoordinatedHandler
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.rendezvous.etcd_line import EtcdLine
from holdfast.rendezvous.etcd_settings import etcd_settings_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.core.news import JobSettings, NodeInfo
    from holdfast.etcd.settings import EtcdSettings
    from holdfast.rendezvous.parameters import RendezvousParameters

FIRST_CONTACT_S = 30.0
"""How long an etcd that was never reached is waited for, where `read_timeout` does not say: unlike
a coordinator, it is there before the job is."""
BEATS_PER_LEASE = 3


def create_etcd_handler(params: RendezvousParameters) -> EtcdHandler:
    """Return the handler of `--rdzv-backend etcd`, or `etcd-v2`."""
    if params.backend == "etcd-v2":
        messages.notice(
            "--rdzv-backend etcd-v2 is the same as etcd here: etcd's API v2 is gone since etcd 3.6"
        )
    return EtcdHandler(params)


class EtcdHandler(CoordinatedHandler):
    """A node's rendezvous with the others on etcd."""

    decider = "etcd"

    def __init__(self, params: RendezvousParameters, *, etcd: EtcdSettings | None = None) -> None:
        self._etcd = etcd or etcd_settings_of(params)
        super().__init__(params)

    @property
    def endpoint(self) -> str:
        """The endpoints of etcd as text."""
        return self._etcd.where

    def refused(self, why: str) -> str:
        """Return that this node cannot be in the job, and why, in one line."""
        return f"etcd at {self.endpoint}: {why}"

    @property
    def lease_s(self) -> float:
        """How long a node is silent before it is lost. etcd counts whole seconds."""
        return float(max(2, math.ceil(self._config.lost_after_s)))

    def set_closed(self) -> None:
        """End the job for all nodes, and wait until that is decided; there need not be a job.

        A leader may be missing just now, and whoever leads next reads only what a node said last.
        """
        super().set_closed()
        connection = self.enter()
        deadline = time.monotonic() + self._config.close_timeout
        while (view := connection.view) is None or view.role is not Role.CLOSED:
            if view is not None and view.role is Role.REFUSED:
                raise RendezvousConnectionError(self.refused(view.why))
            try:
                self._await_news(connection, deadline)
            except RendezvousTimeoutError:
                raise RendezvousTimeoutError(
                    f"the end of the job {self.get_run_id()!r} was not decided in "
                    f"{self._config.close_timeout:g} s: {connection.problem() or 'nobody leads'}"
                ) from None

    def _connect(self, info: NodeInfo, settings: JobSettings) -> EtcdLine:
        conf, lease_s = self._config, self.lease_s
        times = Times(
            beat_s=lease_s / BEATS_PER_LEASE,
            silence_s=lease_s,
            away_s=conf.coordinator_timeout,
            first_contact_s=conf.read_timeout or FIRST_CONTACT_S,
        )
        connection = EtcdLine(
            self._etcd,
            prefix=config.value_of(self._params, "etcd_prefix"),
            run_id=self._params.run_id,
            info=info,
            settings=settings,
            times=times,
            lease_s=lease_s,
        )
        connection.start()
        return connection

    def _address(self) -> tuple[str, int]:
        return self._etcd.endpoints[0]
