"""Sessions and logins of a dashboard: how many, for how long, and how often wrong."""

from __future__ import annotations

from holdfast.views.dashboard.access import (
    ADDRESSES_MAX,
    LOGIN_FAILURES_MAX,
    LOGIN_WINDOW_S,
    SESSION_S,
    SESSIONS_MAX,
    Access,
    draw_token,
    is_on_purpose,
)

TOKEN = draw_token()


def test_a_session_ends_with_its_time_or_its_logout() -> None:
    access = Access(TOKEN, 1)
    first, second = (access.log_in(0.0, TOKEN, "::1") for _ in range(2))
    assert first is not None
    assert second is not None
    assert access.session(SESSION_S - 1, first) is not None
    assert access.session(SESSION_S, first) is None
    assert access.session(0.0, first) is None, "it came back"
    access.log_out(second)
    assert access.session(0.0, second) is None


def test_one_session_more_than_there_may_be_ends_the_oldest() -> None:
    access = Access(TOKEN, 1)
    ids = [access.log_in(0.0, TOKEN, "::1") or "" for _ in range(SESSIONS_MAX + 1)]
    assert access.session(0.0, ids[0]) is None
    assert all(access.session(0.0, one) for one in ids[1:])


def test_a_session_has_a_word_of_its_own() -> None:
    access = Access(TOKEN, 1)
    sessions = [access.session(0.0, access.log_in(0.0, TOKEN, "") or "") for _ in range(2)]
    first, second = sessions
    assert first is not None
    assert second is not None
    assert is_on_purpose(first, {"x-holdfast-csrf": first.word})
    assert not is_on_purpose(first, {"x-holdfast-csrf": second.word})
    assert not is_on_purpose(first, {})


def test_wrong_tokens_make_their_address_wait_and_no_other() -> None:
    access = Access(TOKEN, 1)
    for at in range(LOGIN_FAILURES_MAX):
        assert not access.must_wait(float(at), "10.0.0.1")
        assert access.log_in(float(at), TOKEN[:-1], "10.0.0.1") is None
    assert access.must_wait(LOGIN_WINDOW_S - 1, "10.0.0.1")
    assert not access.must_wait(LOGIN_WINDOW_S - 1, "10.0.0.2")
    assert not access.must_wait(LOGIN_WINDOW_S, "10.0.0.1")


def test_addresses_that_guess_are_not_remembered_without_end() -> None:
    access = Access(TOKEN, 1)
    for at in range(ADDRESSES_MAX + 10):
        access.log_in(0.0, "wrong", str(at))
    assert len(access._failures) == ADDRESSES_MAX
