"""Properties of every store, ours and torch's; `stores.GAPS` lists the gaps of torch's stores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from stores import ALL, over

from holdfast.store import PrefixStore, Store

LONG = timedelta(minutes=1)
SHORT = timedelta(milliseconds=20)
# Ours raise an error of both types; torch's FileStore raises a plain RuntimeError.
TOO_LATE = (RuntimeError, TimeoutError)
VALUE_BYTES_MAX = 8 * 1024 * 1024
KEY_CHARS = 8000  # The limit is 8192, and a prefix of some of these stores is a path.

CHANGES = {
    "set": lambda store, key: store.set(key, "1"),
    "add": lambda store, key: store.add(key, 1),
    "append": lambda store, key: store.append(key, "1"),
    "multi_set": lambda store, key: store.multi_set(["other", key], ["1", "1"]),
    "compare_set": lambda store, key: store.compare_set(key, "", "1"),
}


def test_store_has_the_whole_interface(store: Any) -> None:
    assert isinstance(store, Store)


# Values


def test_values_are_returned_as_bytes(store: Any) -> None:
    store.set("text", "é")
    store.set("bytes", b"\x00\xff")
    assert (store.get("text"), store.get("bytes")) == ("é".encode(), b"\x00\xff")


@pytest.mark.parametrize("key", ["", ".", "..", "a/b", "/", "a b", "é", "x" * 400, "%2F"])
def test_any_text_is_a_valid_key(store: Any, key: str) -> None:
    store.set(key, "1")
    store.set(f"{key}+", "2")
    assert store.get(key) == b"1"
    assert store.check([key])


@pytest.mark.parametrize(
    ("before", "expected", "after"),
    [(None, "", "two"), (None, "some", None), ("one", "one", "two"),
     ("one", "", "one"), ("one", "on", "one"), ("one", "one ", "one")],
)  # fmt: skip
def test_compare_set_changes_only_the_expected_value(
    store: Any, before: str | None, expected: str, after: str | None
) -> None:
    if before is not None:
        store.set("key", before)
    assert store.compare_set("key", expected, "two") == (after or expected).encode()
    assert store.check(["key"]) == (after is not None)
    assert after is None or store.get("key") == after.encode()


def test_one_of_many_concurrent_compare_sets_wins(store: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: store.compare_set("key", "", str(one)), range(24)))
    assert len(set(answers)) == 1


def test_set_replaces_the_earlier_value(store: Any) -> None:
    store.set("key", "one")
    store.set("key", "two")
    assert store.get("key") == b"two"


def test_empty_value_is_a_value(store: Any) -> None:
    store.set("key", "")
    assert store.check(["key"])
    assert store.get("key") == b""
    assert store.compare_set("key", "", "one") == b"one"


def test_largest_value_and_long_key_are_stored(store: Any) -> None:
    value = bytes(range(256)) * (VALUE_BYTES_MAX // 256)
    key = "é" * (KEY_CHARS // 2)
    store.set(key, value)
    assert store.get(key) == value
    assert store.check([key])
    assert not store.check([key[:-1]])


def test_deleted_key_has_no_value(store: Any) -> None:
    store.set("key", "one")
    assert store.delete_key("key")
    assert not store.check(["key"])
    assert store.compare_set("key", "", "two") == b"two"


def test_keys_are_counted(store: Any) -> None:
    before = store.num_keys()
    store.set("a", "1")
    store.set("b", "1")
    store.set("a", "2")
    assert store.num_keys() == before + 2
    store.delete_key("a")
    assert store.num_keys() == before + 1


@over(ALL, without="deletion of nothing")
def test_delete_of_a_missing_key_returns_false(store: Any) -> None:
    assert not store.delete_key("key")
    store.set("key", "")
    assert store.delete_key("key")
    assert not store.delete_key("key")


@over(ALL, without="listed keys")
def test_keys_are_listed(store: Any) -> None:
    keys = ["a", "a/b", "é ü", "%2F", "x" * 500, ".", ""]
    store.multi_set(keys, ["1"] * len(keys))
    assert sorted(store.list_keys()) == sorted(keys)
    store.delete_key("a")
    store.delete_key("x" * 500)
    assert sorted(store.list_keys()) == sorted({*keys} - {"a", "x" * 500})


def test_multi_set_and_multi_get_handle_several_keys(store: Any) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]


def test_multi_set_and_multi_get_accept_no_keys(store: Any) -> None:
    store.multi_set([], [])
    assert store.multi_get([]) == []
    assert store.check([])
    store.wait([], SHORT)


def test_append_extends_the_value(store: Any) -> None:
    store.append("key", "one")
    store.append("key", b" two")
    assert store.get("key") == b"one two"


def test_concurrent_appends_are_all_kept(store: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: store.append("key", chr(97 + one)), range(24)))
    assert sorted(store.get("key")) == list(range(97, 97 + 24))


def test_add_returns_and_stores_the_sum(store: Any) -> None:
    assert store.add("count", 0) == 0
    assert store.get("count") == b"0"
    assert (store.add("count", 2), store.add("count", -5)) == (2, -3)
    assert store.get("count") == b"-3"


@pytest.mark.parametrize("value", ["40", " 40", "+40", "40 and more"])
def test_add_continues_from_a_set_number(store: Any, value: str) -> None:
    store.set("count", value)
    assert store.add("count", 2) == 42
    assert store.get("count") == b"42"


def test_concurrent_adds_all_count(store: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        totals = sorted(pool.map(lambda _: store.add("count", 1), range(100)))
    assert totals == list(range(1, 101))


# Waiting


def waiting(store: Any, *keys: str) -> threading.Thread:
    """Return a thread that is about to wait for keys, with a store of its own."""
    about_to = threading.Event()
    mine = store.clone()

    def wait() -> None:
        about_to.set()
        mine.wait(list(keys), LONG)

    thread = threading.Thread(target=wait)
    thread.start()
    about_to.wait()
    return thread


def test_check_requires_all_keys(store: Any) -> None:
    store.set("a", "")
    assert store.check(["a"])
    assert not store.check(["a", "b"])


@over(ALL, without="waits ended by add")
@pytest.mark.parametrize("how", CHANGES)
def test_every_change_ends_a_wait_for_its_key(store: Any, how: str) -> None:
    thread = waiting(store, "key")
    CHANGES[how](store, "key")
    thread.join(60)
    assert not thread.is_alive()


def test_get_waits_for_a_value(store: Any) -> None:
    def answer(mine: Any) -> None:
        first, second = mine.multi_get(["one", "two"])
        mine.set("answer", mine.get("question") + first + second)

    with ThreadPoolExecutor() as pool:
        answering = pool.submit(answer, store.clone())
        assert not store.check(["answer"])
        for key in ("one", "two", "question"):
            store.set(key, f"{key} ")
        assert store.get("answer") == b"question one two "
        answering.result()


def test_wait_ends_when_all_keys_exist_or_times_out(store: Any) -> None:
    store.set("a", "")
    store.wait(["a"], LONG)
    with pytest.raises(TOO_LATE):
        store.wait(["a", "b"], SHORT)
    store.set("b", "")
    store.wait(["a", "b"], LONG)


@over(ALL, without="own times")
@pytest.mark.parametrize("how", ["get", "multi_get", "wait", "queue_pop", "barrier"])
def test_default_timeout_of_the_store_applies(store: Any, how: str) -> None:
    before = store.timeout
    store.set_timeout(SHORT)
    try:
        assert store.timeout == SHORT
        call = getattr(store, how)
        arguments: dict[str, list[Any]] = {
            "multi_get": [["a"]],
            "wait": [["a"]],
            "barrier": ["a", 2],
        }
        with pytest.raises(TOO_LATE):
            call(*arguments.get(how, ["a"]))
    finally:
        store.set_timeout(before)  # Other tests may share the underlying store.


@over(ALL, without="extended api")
def test_store_implements_the_extended_calls(store: Any) -> None:
    assert store.has_extended_api()


# Queues


@over(ALL, without="queues")
def test_queue_is_first_in_first_out(store: Any) -> None:
    assert store.queue_len("queue") == 0
    for value in ["one", b"\x00\xff", "", "é"]:
        store.queue_push("queue", value)
    assert store.queue_len("queue") == 4
    values = [store.queue_pop("queue") for _ in range(4)]
    assert values == [b"one", b"\x00\xff", b"", "é".encode()]
    assert store.queue_len("queue") == 0


@over(ALL, without="queues")
def test_pop_from_an_empty_queue_fails(store: Any) -> None:
    with pytest.raises(RuntimeError, match="empty") as caught:
        store.queue_pop("queue", block=False)
    assert type(caught.value).__name__ == "QueueEmptyError"
    store.queue_push("queue", "one")
    assert store.queue_pop("queue", block=False) == b"one"


@over(ALL, without="queues")
def test_queue_exists_while_it_has_values(store: Any) -> None:
    thread = waiting(store, "queue")
    store.queue_push("queue", "one")
    thread.join(60)
    assert not thread.is_alive()
    assert store.check(["queue"])
    store.queue_pop("queue")
    assert not store.check(["queue"])


@over(ALL, without="queues")
def test_queue_and_value_of_one_name_are_independent(store: Any) -> None:
    store.set("key", "value")
    before = store.num_keys()
    store.queue_push("key", "one")
    store.queue_push("other", "two")
    assert (store.num_keys(), store.list_keys()) == (before, ["key"])
    assert store.get("key") == b"value"
    assert store.delete_key("key")
    assert store.check(["key"])
    assert store.queue_pop("key") == b"one"


@over(ALL, without="queues")
def test_each_queued_value_is_popped_once(store: Any) -> None:
    def take(mine: Any) -> list[bytes]:
        return [mine.queue_pop("queue", block=False) for _ in range(6)]

    for number in range(24):
        store.queue_push("queue", str(number))
    with ThreadPoolExecutor(4) as pool:
        taken = [one for some in pool.map(take, [store.clone() for _ in range(4)]) for one in some]
    assert sorted(map(int, taken)) == list(range(24))
    assert store.queue_len("queue") == 0


# Barriers


def test_barrier_of_one_caller_is_open(store: Any) -> None:
    store.barrier("here", 1)
    store.barrier("there", 1, LONG)


def test_all_callers_pass_a_barrier_with_the_last_arrival(store: Any) -> None:
    came: list[int] = []

    def arrive(number: int, mine: Any) -> int:
        came.append(number)
        mine.barrier("here", 4, LONG)
        return len(came)

    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(arrive, range(4), [store.clone() for _ in range(4)]))
    assert seen == [4] * 4


def test_barrier_times_out(store: Any) -> None:
    with pytest.raises(TOO_LATE):
        store.barrier("here", 2, timeout=SHORT)


# Parts


@over(ALL, without="listed keys")
def test_prefix_store_works_on_any_store(store: Any) -> None:
    part = PrefixStore("some", PrefixStore("more", store))
    part.set("key", "1")
    store.set("some", "2")
    assert store.get("more/some/key") == b"1"
    assert part.list_keys() == ["key"]
    assert sorted(store.list_keys()) == ["more/some/key", "some"]
    assert part.num_keys() == store.num_keys()
    assert part.multi_get(["key", "key"]) == [b"1", b"1"]
    assert (part.add("count", 2), part.compare_set("key", "1", "3")) == (2, b"3")
    part.append("key", "4")
    part.multi_set(["a", "b"], ["5", "6"])
    part.wait(["key", "a", "b"], 60)
    assert (part.get("key"), part.check(["a", "b", "count"])) == (b"34", True)
    part.barrier("here", 1, 60.0)
    assert part.delete_key("key")
    with pytest.raises(TOO_LATE):
        part.wait(["key"], SHORT)


# Gaps


@over(["FileStore"])
def test_torchs_file_store_still_lacks_the_extended_calls(store: Any) -> None:
    """If this fails, an entry of `GAPS` is no longer needed."""
    with pytest.raises(NotImplementedError):
        store.queue_len("queue")
    assert store.list_keys() != []
    assert store.delete_key("nothing")
    assert not store.has_extended_api()
