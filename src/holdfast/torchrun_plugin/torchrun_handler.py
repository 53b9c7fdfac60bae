"""`TorchrunHandler`: Holdfast's rendezvous for torchrun's agent.

As with torchrun's own `c10d`, each node counts restarts itself, polls every `monitor_interval`
whether to join a new round, and cannot restart its workers once they have succeeded. Unlike `c10d`,
all nodes form a new round if a node joins, leaves or dies, and a node that fails for good ends the
job on all nodes immediately.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import api as torch_rendezvous

from holdfast import console
from holdfast.core.protocol import Failure
from holdfast.errors import HoldfastError, UsageError
from holdfast.rendezvous import rendezvous_errors as ours
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.torchrun_plugin.plugin_node import PluginNode
from holdfast.torchrun_plugin.round_store import PluginRoundStore

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "holdfast"


class TorchrunHandler(torch_rendezvous.RendezvousHandler):  # type: ignore[misc]
    """The rendezvous of one torchrun agent."""

    def __init__(self, params: Any) -> None:
        with _as_torch_errors():
            self._node = PluginNode(_holdfast_parameters(params))
        self._is_shut = False
        self._not_needed = False
        # torchrun does not shut down its handler when a signal ends it. Leave the job in that case too, but
        # not in forked processes.
        atexit.register(_leave, weakref.ref(self), os.getpid())

    @property
    def use_agent_store(self) -> bool:
        """Whether the first node's torchrun serves the workers' store."""
        return self._node.use_agent_store

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return NAME

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._node.get_run_id()

    def next_rendezvous(self) -> Any:
        """Wait until this node and all other members are in a new round, and return it."""
        try:
            with _as_torch_errors():
                info = self._node.next_rendezvous()
        except torch_rendezvous.RendezvousGracefulExitError as end:
            console.notice(str(end))
            self._not_needed = True
            raise
        view = self._node.round
        assert view is not None
        store = PluginRoundStore(self._node, self._node.access.scope_of(view))
        point = info.bootstrap_store_info
        store_address = torch_rendezvous.RendezvousStoreInfo(point.master_addr, point.master_port)
        return torch_rendezvous.RendezvousInfo(store, info.rank, info.world_size, store_address)

    def is_closed(self) -> bool:
        """Return whether the job is over, as far as this node knows."""
        with _as_torch_errors():
            return self._node.is_closed()

    def set_closed(self) -> None:
        """End the job for all nodes."""
        with _as_torch_errors():
            self._node.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return more than 0 if this node should join the next round, or the job is over.

        torchrun's agent polls nothing else while its workers run, and must not continue a job that
        another node has ended.
        """
        with _as_torch_errors():
            return self._node.num_nodes_waiting()

    def shutdown(self) -> bool:
        """Leave the job, and report why if torchrun is about to end; return whether the report succeeded."""
        cause = sys.exception()
        succeeded = True
        try:
            if not self._is_shut:
                self._is_shut = True
                self._report_end(cause)
        except HoldfastError as error:
            console.warning(f"this node could not leave the job properly: {error}")
            succeeded = False
        self.leave()
        if self._not_needed and isinstance(cause, AttributeError):
            # After `RendezvousGracefulExitError`, torchrun's agent returns no result. Its caller
            # (torch 2.13) searches the result for failures, and would raise `AttributeError`.
            raise SystemExit(0)
        return succeeded

    def leave(self) -> None:
        """Leave the job, and release the handler's resources; may be called repeatedly."""
        self._node.shutdown()

    def _report_end(self, cause: BaseException | None) -> None:
        if isinstance(cause, ChildFailedError):
            self._node.report_failed(_first_failure(self._node.node_id, cause))
        elif cause is None and self._node.is_done:
            self._node.wait_while_needed()


def _leave(handler: weakref.ref[TorchrunHandler], pid: int) -> None:
    live_handler = handler()
    if live_handler is not None and os.getpid() == pid:
        live_handler.leave()


def _holdfast_parameters(params: Any) -> RendezvousParameters:
    """Return torchrun's parameters as ours."""
    if str(params.config.get("store_type", "tcp")).strip().lower() != "tcp":
        raise UsageError("--rdzv-conf: store_type: only tcp can be used with torchrun")
    return RendezvousParameters(
        NAME,
        params.endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        **params.config,
    )


def _first_failure(node: str, error: Any) -> Failure:
    """Return the failure that ended torchrun, with a one-line summary for the other nodes."""
    host = os.uname().nodename
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return Failure(
        node=node,
        host=host,
        rank=rank,
        pid=failure.pid,
        exitcode=code,
        summary=f"rank {rank} (pid {failure.pid} on {host}) failed: {how}; its torchrun stopped",
        retryable=False,
    )


@contextmanager
def _as_torch_errors() -> Iterator[None]:
    """Convert our exceptions to torch's, with the same message."""
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from None
    except ours.RendezvousClosedError as error:
        raise torch_rendezvous.RendezvousClosedError(str(error)) from None
    except ours.RendezvousTimeoutError as error:
        raise torch_rendezvous.RendezvousTimeoutError(str(error)) from None
    except ours.RendezvousConnectionError as error:
        raise torch_rendezvous.RendezvousConnectionError(str(error)) from None
    except ours.RendezvousStateError as error:
        raise torch_rendezvous.RendezvousStateError(str(error)) from None
    except ours.RendezvousGracefulExitError as error:
        raise torch_rendezvous.RendezvousGracefulExitError(str(error)) from None
    except HoldfastError as error:
        raise torch_rendezvous.RendezvousError(str(error)) from None
