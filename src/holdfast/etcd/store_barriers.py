"""A barrier in etcd: how many have come is counted, and those who wait watch for the next turn.

When the last has come, the turn is one higher and the count begins anew: so nobody who comes early
to the next can be taken for one of this.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import Put
from holdfast.etcd.store_places import pair
from holdfast.etcd.store_waiting import Wait
from holdfast.store.errors import DistError, StoreTimeoutError
from holdfast.store.memory import added, few_came

if TYPE_CHECKING:
    from holdfast.core.etcd_calls import Op
    from holdfast.etcd.store_places import Places
    from holdfast.etcd.store_transactions import Found, Transactions


def meet(calls: Transactions, places: Places, key: str, world_size: int, timeout_s: float) -> None:
    """Come to a barrier and wait until so many have; raise `StoreTimeoutError` if they do not."""
    barrier = places.barrier(key)
    turn, came = _come(calls, places, key, world_size)
    if came >= world_size:
        return
    passed = False
    try:
        Wait(
            calls, {key: barrier}, timeout_s, accepts=lambda one: pair(one.value)[0] != turn
        ).result()
        passed = True
    except StoreTimeoutError as late:
        passed, came = _give_up(calls, places, key, turn)
        if not passed:
            raise few_came(key, came, world_size, timeout_s, calls.where) from late
    except BaseException:  # A signal's handler may have ended the wait, too.
        with suppress(DistError):
            _give_up(calls, places, key, turn)
        raise


def _come(calls: Transactions, places: Places, key: str, world_size: int) -> tuple[int, int]:
    """Be counted at a barrier; return which turn of it this is, and how many have come."""
    value, barrier = places.value(key), places.barrier(key)

    def make(found: list[Found]) -> tuple[list[Op], tuple[int, int]]:
        now, counted = found
        added(key, None if now is None else now.value, 0)  # What is no count has another use.
        turn, came = (0, 0) if counted is None else pair(counted.value)
        came += 1
        after = (turn, came) if came < world_size else (turn + 1, 0)
        return [Put(value.key, b"%d" % came), Put(barrier.key, b"%d %d" % after)], (turn, came)

    return calls.change([value, barrier], make)[0]


def _give_up(calls: Transactions, places: Places, key: str, turn: int) -> tuple[bool, int]:
    """Be counted no more; return whether all have come after all, and how many else."""
    value, barrier = places.value(key), places.barrier(key)

    def make(found: list[Found]) -> tuple[list[Op], tuple[bool, int]]:
        now, counted = found
        if counted is None:
            return [], (False, 1)
        current, came = pair(counted.value)
        if current != turn:
            return [], (True, came)
        ops: list[Op] = [Put(barrier.key, b"%d %d" % (turn, came - 1))]
        if now is not None:
            ops.append(Put(value.key, b"%d" % (came - 1)))
        return ops, (False, came)

    return calls.change([value, barrier], make)[0]
