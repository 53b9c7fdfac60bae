from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.timers import client as clients
from holdfast.timers.client import TimerClient, configure, expires

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept(TimerClient):
    """Keeps what it is asked, as a server would."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self.asked: list[str] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.timers[scope_id] = expiration_time
        self.asked.append(scope_id)

    def release(self, scope_id: str) -> None:
        del self.timers[scope_id]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(clients, "_configured", None)
    yield Kept()
    assert not clients._scopes_in_use


def test_a_block_has_a_timer_while_it_is_entered(client: Kept) -> None:
    before = time.time()
    with expires(60, "load", client):
        assert before + 60 <= client.timers["load"] <= time.time() + 60
    assert client.timers == {}


def test_a_block_without_a_name_is_known_by_its_file_and_line(client: Kept) -> None:
    with expires(60, client=client):
        (scope,) = client.timers
    file, _, line = scope.rpartition("#")
    assert file == __file__
    assert "with expires(60, client=client)" in Path(file).read_text().splitlines()[int(line) - 1]


def test_nested_blocks_without_names_keep_their_own_time(client: Kept) -> None:
    def nest(times: list[float]) -> None:
        with expires(times[0], client=client):
            if times[1:]:
                nest(times[1:])
            left.append(sorted(round(at - start) for at in client.timers.values()))

    left: list[list[int]] = []
    start = time.time()
    nest([60, 5, 30])
    assert left == [[5, 30, 60], [5, 60], [60]]
    assert client.timers == {}


def test_nested_blocks_of_one_name_keep_their_own_time(client: Kept) -> None:
    with expires(60, "step", client):
        outer = client.timers["step"]
        with expires(5, "step", client):
            assert sorted(client.timers) == ["step", "step (2)"]
            assert client.timers["step"] == outer
        assert client.timers == {"step": outer}


def test_blocks_of_threads_do_not_meet(client: Kept) -> None:
    barrier = threading.Barrier(8)

    def run() -> None:
        with expires(60, "step", client):
            barrier.wait()
            seen.append(len(client.timers))
            barrier.wait()

    seen: list[int] = []
    threads = [threading.Thread(target=run) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == [8] * 8
    assert client.timers == {}


def test_a_block_that_fails_is_left_too(client: Kept) -> None:
    with pytest.raises(ZeroDivisionError), expires(60, "load", client):
        raise ZeroDivisionError
    assert client.timers == {}


def test_a_block_may_be_entered_again_and_within_itself(client: Kept) -> None:
    block = expires(60, "a", client)
    with block, block:
        assert sorted(client.timers) == ["a", "a (2)"]
    with block:
        assert sorted(client.timers) == ["a"]


def test_a_block_that_several_threads_are_in_is_left_by_each_for_itself(client: Kept) -> None:
    block = expires(60, "a", client)
    entered, leave = threading.Event(), threading.Event()

    def be_in_it() -> None:
        with block:
            entered.set()
            leave.wait()

    other = threading.Thread(target=be_in_it, daemon=True)
    with block:
        other.start()
        entered.wait()
    # Were it the other's that is released, this thread's time would go on, with nobody to end it.
    assert [*client.timers] == ["a (2)"]
    with block:  # As little may it be that of whoever came first.
        assert [*client.timers] == ["a (2)", "a"]
    assert [*client.timers] == ["a (2)"]
    leave.set()
    other.join()
    block.__enter__()
    leaving = threading.Thread(target=block.__exit__, args=(None, None, None))
    leaving.start()
    leaving.join()
    assert client.timers == {}


def test_a_function_is_watched_at_every_call(client: Kept) -> None:
    @expires(60, "count", client)
    def count(depth: int) -> int:
        return 1 if depth == 0 else 1 + count(depth - 1)

    assert count(2) == 3
    assert count.__name__ == "count"
    assert client.asked == ["count", "count (2)", "count (3)"]


def test_the_client_of_the_process_is_used_unless_another_is_named(client: Kept) -> None:
    configured = Kept()
    configure(configured)
    with expires(60, "a"), expires(60, "a", client):
        assert (sorted(configured.timers), sorted(client.timers)) == (["a"], ["a"])


def test_without_a_client_it_is_said_what_to_do(client: Kept) -> None:
    block = expires(60)
    with pytest.raises(RuntimeError, match=r"timer\.configure"), block:
        pass


def test_a_timer_that_could_not_be_set_is_not_released() -> None:
    class Refusing(Kept):
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError), expires(60, "a", Refusing()):
        pass
    assert not clients._scopes_in_use
