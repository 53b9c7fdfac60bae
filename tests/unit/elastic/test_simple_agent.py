from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.agent.spec import RunResult, WorkerGroup, WorkerSpec, WorkerState
from holdfast.elastic._impl.agents import SimpleElasticAgent
from holdfast.processes.signals import SignalException, SignalWatch
from rendezvous_fakes import ScriptedRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.rendezvous.handler import RendezvousInfo

HEALTHY, SUCCEEDED = WorkerState.HEALTHY, WorkerState.SUCCEEDED
FAILED, UNHEALTHY = WorkerState.FAILED, WorkerState.UNHEALTHY
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FOREVER_S = 3600.0


class NotingRendezvous(ScriptedRendezvous):
    """A rendezvous that notes each request for a round."""

    def __init__(self, story: list[str]) -> None:
        super().__init__()
        self._story = story

    def next_rendezvous(self) -> RendezvousInfo:
        self._story.append("join")
        return super().next_rendezvous()


class ScriptedAgent(SimpleElasticAgent):
    """Has workers in memory: each check returns the next result of a script.

    The story has every call of a hook. `during` has further actions for a hook.
    """

    def __init__(self, spec: WorkerSpec, looks: list[RunResult], story: list[str], **how: Any):
        super().__init__(spec, **how)
        self.looks = looks
        self.story = story
        self.during: dict[str, Callable[[], object]] = {}

    def _note(self, name: str) -> None:
        self.story.append(name)
        self.during.get(name, lambda: None)()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._note("start")
        return {worker.local_rank: f"id {worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._note("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note("look")
        return self.looks.pop(0)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self._note(f"shutdown {death_sig.name} {timeout:g}")


def scripted(*looks: WorkerState | RunResult, **settings: Any) -> ScriptedAgent:
    story: list[str] = []
    how = {"shutdown_timeout": settings.pop("shutdown_timeout", 30)}
    spec = WorkerSpec(
        **{
            "role": "trainer", "local_world_size": 2,
            "rdzv_handler": NotingRendezvous(story), "entrypoint": "train",
            "monitor_interval": 0.001, "max_restarts": 0, **settings,
        }
    )  # fmt: skip
    results = [look if isinstance(look, RunResult) else RunResult(look) for look in looks]
    return ScriptedAgent(spec, results, story, **how)


def handlers() -> list[Any]:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return [fd, *(signal.getsignal(one) for one in HANDLED)]


@pytest.fixture(autouse=True)
def _handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    before = handlers()
    yield
    assert handlers() == before


@pytest.mark.parametrize("bad", [FAILED, UNHEALTHY])
def test_failure_restarts_workers_while_the_budget_lasts(bad: WorkerState) -> None:
    agent = scripted(bad, HEALTHY, bad, SUCCEEDED, max_restarts=2)
    counts: list[tuple[int, WorkerState]] = []
    agent.during["start"] = lambda: counts.append(
        (agent.restart_count, agent.get_worker_group().state)
    )
    assert agent.run().state is SUCCEEDED
    assert agent.story == [
        *("join", "start", "look", "stop"),
        *("join", "start", "look", "look", "stop"),
        *("join", "start", "look", "shutdown SIGTERM 30"),
    ]
    stopped = WorkerState.STOPPED
    assert counts == [(0, WorkerState.INIT), (1, stopped), (2, stopped)]


def test_handler_that_reports_changes_is_not_polled() -> None:
    class Telling(ScriptedRendezvous):
        polls_membership = False

    handler = Telling(waiting=[1, 1])
    assert scripted(HEALTHY, SUCCEEDED, rdzv_handler=handler).run().state is SUCCEEDED
    assert handler.polls == 0


def test_foreign_handler_is_polled_after_each_healthy_check() -> None:
    class Foreign:
        """Has the methods of TorchElastic's handlers, but does not derive from our class."""

        use_agent_store = False
        polls = 0

        def next_rendezvous(self) -> RendezvousInfo:
            return ScriptedRendezvous().next_rendezvous()

        def num_nodes_waiting(self) -> int:
            self.polls += 1
            return 0

        def get_run_id(self) -> str:
            return "job"

    handler = Foreign()
    assert scripted(HEALTHY, HEALTHY, SUCCEEDED, rdzv_handler=handler).run().state is SUCCEEDED
    assert handler.polls == 2


class Broken(Exception):
    pass


def breaks() -> None:
    raise Broken


@pytest.mark.parametrize("hook", ["start", "look", "stop"])
def test_exception_of_a_hook_propagates_after_a_shutdown(hook: str) -> None:
    agent = scripted(FAILED, max_restarts=3, shutdown_timeout=7)
    agent.during[hook] = breaks
    with pytest.raises(Broken):
        agent.run()
    assert agent.story[-2:] == [hook, "shutdown SIGTERM 7"]


@pytest.mark.parametrize("method", ["next_rendezvous", "num_nodes_waiting"])
def test_exception_of_a_handler_propagates_after_a_shutdown(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = scripted(HEALTHY)
    monkeypatch.setattr(agent.get_worker_group().spec.rdzv_handler, method, breaks)
    with pytest.raises(Broken):
        agent.run()
    assert agent.story[-1] == "shutdown SIGTERM 30"


def raised(one: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(one)


@pytest.mark.parametrize("one", HANDLED)
def test_signal_shuts_workers_down_once_with_the_same_signal(one: signal.Signals) -> None:
    agent = scripted(HEALTHY, max_restarts=3, monitor_interval=0.001, shutdown_timeout=5)
    agent.during["look"] = raised(one)
    with pytest.raises(SignalException, match=f" received {one.name} ") as ended:
        agent.run()
    assert ended.value.sigval is one
    assert agent.story == ["join", "start", "look", f"shutdown {one.name} 5"]


def test_signal_does_not_wait_for_the_next_check() -> None:
    agent = scripted(monitor_interval=FOREVER_S)
    agent.during["start"] = raised(signal.SIGTERM)
    with pytest.raises(SignalException):
        agent.run()
    assert agent.story == ["join", "start", "shutdown SIGTERM 30"]


def test_signal_just_before_the_rendezvous_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = SignalWatch.raise_pending

    def look_then_signal(self: SignalWatch) -> None:
        looked(self)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SignalWatch, "raise_pending", look_then_signal)
    agent = scripted()
    with pytest.raises(SignalException):
        agent.run()
    assert agent.story == ["shutdown SIGTERM 30"]
