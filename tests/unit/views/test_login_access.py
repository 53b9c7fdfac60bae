"""Sessions and logins of a dashboard: number and duration."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.views.dashboard.access import (
    SESSION_HEADER,
    SESSION_S,
    SESSIONS_MAX,
    DashboardAccess,
    LoginSession,
    random_token,
)
from in_loop import in_loop

TOKEN = random_token()


def session(access: DashboardAccess, now: float, secret: str | None) -> LoginSession | None:
    return access.session_of(now, {SESSION_HEADER: secret or ""})


def test_session_ends_by_timeout_or_logout() -> None:
    access = DashboardAccess(TOKEN)
    first, second = (access.log_in(0.0, TOKEN) for _ in range(2))
    assert session(access, SESSION_S - 1, first) is not None
    assert session(access, SESSION_S, first) is None
    assert session(access, 0.0, first) is None, "an expired session is removed"
    found = session(access, 0.0, second)
    assert found is not None
    access.log_out(found)
    assert session(access, 0.0, second) is None


def test_wrong_token_and_missing_secret_give_no_session() -> None:
    access = DashboardAccess(TOKEN)
    assert access.log_in(0.0, TOKEN[:-1]) is None
    assert access.log_in(0.0, TOKEN) is not None
    assert access.session_of(0.0, {}) is None


def test_session_above_the_limit_ends_the_oldest() -> None:
    access = DashboardAccess(TOKEN)
    secrets = [access.log_in(0.0, TOKEN) for _ in range(SESSIONS_MAX + 1)]
    assert session(access, 0.0, secrets[0]) is None
    assert all(session(access, 0.0, one) for one in secrets[1:])


@in_loop
async def test_streams_end_when_the_session_expires() -> None:
    expired = LoginSession(asyncio.get_running_loop().time() - SESSION_S)
    with pytest.raises(TimeoutError):
        async with expired.limit():
            await asyncio.Event().wait()
