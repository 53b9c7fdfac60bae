"""Sessions and logins of a dashboard: number, duration, and limits on wrong tokens."""

from __future__ import annotations

from holdfast.views.dashboard.access import (
    ADDRESSES_MAX,
    LOGIN_FAILURES_MAX,
    LOGIN_WINDOW_S,
    SESSION_S,
    SESSIONS_MAX,
    DashboardAccess,
    has_csrf_token,
    random_token,
)

TOKEN = random_token()


def test_session_ends_by_timeout_or_logout() -> None:
    access = DashboardAccess(TOKEN, 1)
    first, second = (access.log_in(0.0, TOKEN, "::1") for _ in range(2))
    assert first is not None
    assert second is not None
    assert access.session(SESSION_S - 1, first) is not None
    assert access.session(SESSION_S, first) is None
    assert access.session(0.0, first) is None, "an expired session is removed"
    access.log_out(second)
    assert access.session(0.0, second) is None


def test_session_above_the_limit_ends_the_oldest() -> None:
    access = DashboardAccess(TOKEN, 1)
    ids = [access.log_in(0.0, TOKEN, "::1") or "" for _ in range(SESSIONS_MAX + 1)]
    assert access.session(0.0, ids[0]) is None
    assert all(access.session(0.0, one) for one in ids[1:])


def test_each_session_has_its_own_csrf_value() -> None:
    access = DashboardAccess(TOKEN, 1)
    sessions = [access.session(0.0, access.log_in(0.0, TOKEN, "") or "") for _ in range(2)]
    first, second = sessions
    assert first is not None
    assert second is not None
    assert has_csrf_token(first, {"x-holdfast-csrf": first.secret})
    assert not has_csrf_token(first, {"x-holdfast-csrf": second.secret})
    assert not has_csrf_token(first, {})


def test_wrong_tokens_delay_only_their_address() -> None:
    access = DashboardAccess(TOKEN, 1)
    for at in range(LOGIN_FAILURES_MAX):
        assert not access.must_wait(float(at), "10.0.0.1")
        assert access.log_in(float(at), TOKEN[:-1], "10.0.0.1") is None
    assert access.must_wait(LOGIN_WINDOW_S - 1, "10.0.0.1")
    assert not access.must_wait(LOGIN_WINDOW_S - 1, "10.0.0.2")
    assert not access.must_wait(LOGIN_WINDOW_S, "10.0.0.1")


def test_memory_of_guessing_addresses_is_bounded() -> None:
    access = DashboardAccess(TOKEN, 1)
    for at in range(ADDRESSES_MAX + 10):
        access.log_in(0.0, "wrong", str(at))
    assert len(access._failures) == ADDRESSES_MAX
