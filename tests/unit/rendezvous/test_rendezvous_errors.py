from __future__ import annotations

import pickle

import pytest

from holdfast.errors import HoldfastError
from holdfast.rendezvous import errors

KINDS = [
    errors.RendezvousError,
    errors.RendezvousClosedError,
    errors.RendezvousTimeoutError,
    errors.RendezvousConnectionError,
    errors.RendezvousStateError,
    errors.RendezvousGracefulExitError,
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_of_both_families_and_never_without_a_word(
    kind: type[errors.RendezvousError],
) -> None:
    assert issubclass(kind, errors.RendezvousError)
    assert issubclass(kind, HoldfastError)
    bare = kind()
    assert str(bare) == kind.default_message != ""
    assert "\n" not in str(bare)


def test_defaults_tell_the_kinds_apart() -> None:
    assert len({kind.default_message for kind in KINDS}) == len(KINDS)


def test_a_message_and_a_hint_are_one_line() -> None:
    error = errors.RendezvousStateError("unreadable", hint="remove it")
    assert str(error) == "unreadable (remove it)"
    assert (error.message, error.hint) == ("unreadable", "remove it")


def test_the_environment_is_at_fault_except_for_a_standby_which_ends_well() -> None:
    assert {kind().exit_code for kind in KINDS[:-1]} == {78}
    assert errors.RendezvousGracefulExitError().exit_code == 0


def test_they_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(errors.RendezvousTimeoutError("too late")))
    assert type(error) is errors.RendezvousTimeoutError
    assert str(error) == "too late"
