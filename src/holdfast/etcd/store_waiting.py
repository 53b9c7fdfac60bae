"""Waiting for keys of a store: by a watch on the one that is missing, never by looking again.

Those that are missing are waited for one after the other; when none is left, one look at all tells
whether they are there at once. A watch that ends is no matter: after a look at what happened in
between, there is another. So an etcd that is started again, or forgets old revisions, costs those
who wait nothing but the time it is away; only the look they begin with has to succeed.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import KeyValue, Trouble
from holdfast.etcd.errors import EtcdError
from holdfast.etcd.store_transactions import TXN_OPS_MAX, Transactions, as_store_error
from holdfast.store.errors import DistNetworkError
from holdfast.store.memory import none_came

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.etcd.store_places import Spot
    from holdfast.etcd.store_transactions import Look

AWAY_PAUSE_S_MIN, AWAY_PAUSE_S_MAX = 0.01, 1.0
"""Between two attempts to watch, while etcd is away."""
LOOK_S_MIN = 3.0
"""A look may take so long, also when less of the time is left; the first as long as any call."""
NEXT_S_MAX = 3600.0
"""A watch is asked for news for so long at a time; some waits have no end that a clock knows."""


class Wait:
    """One wait for places, by the names they have for the caller."""

    def __init__(
        self,
        calls: Transactions,
        spots: dict[str, Spot],
        timeout_s: float,
        *,
        keys_only: bool = False,
        accepts: Callable[[KeyValue], bool] = lambda _: True,
    ) -> None:
        self._calls = calls
        self._spots = spots
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._keys_only = keys_only
        self._accepts = accepts
        self._pause_s = AWAY_PAUSE_S_MIN
        self._was_there = False

    def result(self) -> dict[str, KeyValue]:
        """Return what is at each place, once something is at all of them that is accepted.

        Raises `StoreTimeoutError` naming those where there is nothing when the time is over. May
        be called again, within the same time.
        """
        try:
            looks = self._look_again(self._spots) if self._was_there else self._look(self._spots)
            self._was_there = True
            return self._until_all_there(looks)
        except _Over:
            return self._at_last()

    def _until_all_there(self, looks: dict[str, Look]) -> dict[str, KeyValue]:
        seen_before: dict[str, int] = {}
        while True:
            there = self._there(looks)
            missing = [name for name in looks if name not in there]
            if not missing and len(looks) == len(self._spots):
                seen = {name: one.create_revision for name, one in there.items()}
                # More than one transaction has are looked at twice: what was there at both times,
                # and not made anew, was there in between, all of it at once.
                if len(looks) <= TXN_OPS_MAX or seen == seen_before:
                    return there
                seen_before = seen
            elif missing:
                seen_before = {}
                name = missing[0]
                came = self._follow(self._spots[name], looks[name].revision)
                if came is not None:
                    if len(self._spots) == 1:
                        return {name: came}
                    missing.remove(name)
            looks = self._look_again(missing or self._spots)

    def _at_last(self) -> dict[str, KeyValue]:
        """Look a last time, so that what is missing can be named."""
        where, names = self._calls.where, list(self._spots)
        try:
            there = self._there(self._look(names))
        except DistNetworkError as problem:
            raise none_came(names, self._timeout_s, f" since {problem}") from None
        if len(there) == len(names):
            return there
        raise none_came([name for name in names if name not in there], self._timeout_s, where)

    def _there(self, looks: dict[str, Look]) -> dict[str, KeyValue]:
        there = {}
        for name, look in looks.items():
            for one in look.found:
                if self._accepts(one):
                    there[name] = one
        return there

    def _look(self, names: Iterable[str]) -> dict[str, Look]:
        left_s = self._deadline - time.monotonic()
        limit_s = max(LOOK_S_MIN, left_s) if self._was_there else None
        names = list(names)
        spots = [self._spots[name] for name in names]
        looks = self._calls.look(spots, keys_only=self._keys_only, limit_s=limit_s)
        return dict(zip(names, looks, strict=True))

    def _look_again(self, names: Iterable[str]) -> dict[str, Look]:
        """Look as soon as etcd answers."""
        while True:
            try:
                return self._look(names)
            except DistNetworkError:
                self._pause()

    def _follow(self, spot: Spot, revision: int) -> KeyValue | None:
        """Return what comes to a place after a revision; None if it must be looked for again."""
        alive: dict[bytes, KeyValue] = {}
        try:
            with self._calls.client.watch(spot.key, spot.end, revision + 1) as watch:
                while True:
                    try:
                        changes = watch.next(min(self._time_left_s(), NEXT_S_MAX))
                    except TimeoutError:
                        continue
                    self._pause_s = AWAY_PAUSE_S_MIN
                    for one in changes:
                        alive.pop(one.key, None)
                        if one.value is not None:
                            alive[one.key] = KeyValue(
                                key=one.key,
                                value=one.value,
                                create_revision=one.create_revision,
                                mod_revision=one.mod_revision,
                            )
                    # What was deleted again meanwhile did not come.
                    for came in alive.values():
                        if self._accepts(came):
                            return came
        except EtcdError as problem:
            if problem.kind is Trouble.UNREACHABLE:
                self._pause()
            elif problem.kind is not Trouble.COMPACTED:
                raise as_store_error(problem) from None
            return None

    def _pause(self) -> None:
        pause_s = self._pause_s * random.uniform(0.5, 1)  # noqa: S311 (it only spreads attempts)
        time.sleep(min(self._time_left_s(), pause_s))
        self._pause_s = min(2 * self._pause_s, AWAY_PAUSE_S_MAX)

    def _time_left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _Over
        return left_s


class _Over(Exception):
    """The time is over."""
