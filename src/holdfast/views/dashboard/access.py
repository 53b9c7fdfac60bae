"""Access control of a dashboard: the login token, sessions, and protection against other web pages.

A browser sends requests, with cookies, on behalf of any web page. The dashboard therefore checks every
request first:

==========================  ==================================================================
host name                   `Host` is an address, `localhost`, or a configured name; other names that
                            resolve to 127.0.0.1 are rejected (DNS rebinding)
origin                      a request that changes something has our `Origin`, and no request
                            comes from another site (`Sec-Fetch-Site`)
session                     a request has the session's cookie: HttpOnly, SameSite=Strict, never in a URL
intent                      a request that changes something has the session's secret in a header,
                            which no form and no other origin can send
==========================  ==================================================================

This module performs no I/O, and callers pass in the time. Each dashboard has its own login token. The
job's token would let a program join the job, so the dashboard never sends it to a browser.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from holdfast.net.http_server import is_requested_host

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_BYTES = 20
SESSION_BYTES = 32
SESSION_S = 12 * 3600.0
"""A session expires after this time, even if it is in use."""
SESSIONS_MAX = 32
"""Beyond this, a new session ends the oldest one."""
LOGIN_FAILURES_MAX = 10
LOGIN_WINDOW_S = 60.0
"""After `LOGIN_FAILURES_MAX` wrong tokens within this time, an address must wait."""
ADDRESSES_MAX = 1_024
CSRF_HEADER = "x-holdfast-csrf"


class LoginSession:
    """A browser that has logged in."""

    def __init__(self, now: float) -> None:
        self.ends_at = now + SESSION_S
        self.secret = secrets.token_urlsafe(SESSION_BYTES)
        """The secret that requests must send in `CSRF_HEADER` to change something."""


class DashboardAccess:
    """The sessions of a dashboard. `names` are the host names under which it is served."""

    def __init__(self, token: str, port: int, names: tuple[str, ...] = ()) -> None:
        self._token = token
        self._names = ("localhost", *(name.lower() for name in names))
        # Browsers share cookies between the ports of a host.
        self.cookie = f"holdfast-{port}"
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    # Checks of every request.

    def is_ours(self, headers: Mapping[str, str], *, changes: bool) -> bool:
        """Whether a request comes from a page of this dashboard, or from a user's address bar."""
        host = headers.get("host", "")
        if not host or not is_requested_host(host, self._names):
            return False
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin"):
            # A link on another site may open the page, but without the strict cookie.
            is_link = headers.get("sec-fetch-mode") == "navigate" and not changes
            if not is_link or headers.get("sec-fetch-dest") != "document":
                return False
        if not changes:
            return True
        return headers.get("origin", "") in (f"http://{host}", f"https://{host}")

    # Sessions.

    def log_in(self, now: float, token: str, address: str) -> str | None:
        """Return the id of a new session, or None for a wrong token. Call `must_wait` first."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            failures = self._failures.setdefault(address, deque(maxlen=LOGIN_FAILURES_MAX))
            failures.append(now)
            self._failures.move_to_end(address)
            while len(self._failures) > ADDRESSES_MAX:
                self._failures.popitem(last=False)
            return None
        session_id = secrets.token_urlsafe(SESSION_BYTES)
        self._sessions[_digest(session_id)] = LoginSession(now)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session_id

    def must_wait(self, now: float, address: str) -> bool:
        """Whether an address recently sent too many wrong tokens."""
        failures = self._failures.get(address)
        return (
            failures is not None
            and len(failures) == LOGIN_FAILURES_MAX
            and now - failures[0] < LOGIN_WINDOW_S
        )

    def session(self, now: float, session_id: str) -> LoginSession | None:
        """Return the session with this id, unless it has expired."""
        key = _digest(session_id)
        found = self._sessions.get(key)
        if found is not None and now >= found.ends_at:
            del self._sessions[key]
            return None
        return found

    def log_out(self, session_id: str) -> None:
        """End a session."""
        self._sessions.pop(_digest(session_id), None)


def has_csrf_token(session: LoginSession, headers: Mapping[str, str]) -> bool:
    """Whether a request has the secret of its session, which only a page of this dashboard sends."""
    return hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), session.secret.encode())


def random_token() -> str:
    """Return a login token that nobody can guess and a person can type."""
    return secrets.token_hex(TOKEN_BYTES)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
