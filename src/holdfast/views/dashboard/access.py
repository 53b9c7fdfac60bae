"""Access control of a dashboard: the login token, sessions, and protection against other web pages.

A browser sends requests on behalf of any web page. The dashboard therefore checks every request first:

==========================  ==================================================================
host name                   `Host` is an address, `localhost`, or a configured name; other names that
                            resolve to 127.0.0.1 are rejected (DNS rebinding)
origin                      a request that changes something has our `Origin`, and no request
                            comes from another site (`Sec-Fetch-Site`)
session                     a request for anything about the job has the session's secret in a header
==========================  ==================================================================

There are no cookies. A browser sends them by itself, and to every port of a host, so another user of the host
could collect them on a port of their own. The dashboard sends the secret once, in the response to the login. The
page keeps it in the tab's session storage, which a browser separates by origin, port included. No form and no
other origin can send the header.

This module performs no I/O, and callers pass in the time. Each dashboard has its own login token. The
job's token would let a program join the job, so the dashboard never sends it to a browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING

from holdfast.net.http_server import is_requested_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

TOKEN_BYTES = 20
"""The number of random bytes in a login token. Nobody can guess so many, so wrong tokens need no limit: with
a limit, another user could lock out the right token."""
SECRET_BYTES = 32
SESSION_S = 12 * 3600.0
"""A session expires after this time, even if it is in use."""
SESSIONS_MAX = 32
"""Beyond this, a new session ends the oldest one."""
SESSION_HEADER = "x-holdfast-session"


class LoginSession:
    """A tab of a browser that has logged in. Times are on the loop's clock, `time.monotonic`."""

    def __init__(self, now: float) -> None:
        self.ends_at = now + SESSION_S
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the body when the session ends, as `asyncio.timeout` does."""
        async with asyncio.timeout_at(self.ends_at) as limit:
            self._limits.add(limit)
            try:
                yield limit
            finally:
                self._limits.discard(limit)

    def end(self) -> None:
        self.ends_at = 0.0
        for limit in self._limits:
            limit.reschedule(0.0)


class DashboardAccess:
    """The sessions of a dashboard. `names` are the host names under which it is served."""

    def __init__(self, token: str, names: tuple[str, ...] = ()) -> None:
        self._token = token
        self._names = ("localhost", *(name.lower() for name in names))
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()

    # Checks of every request.

    def is_ours(self, headers: Mapping[str, str], *, changes: bool) -> bool:
        """Whether a request comes from a page of this dashboard, or from a user's address bar."""
        host = headers.get("host", "")
        if not host or not is_requested_host(host, self._names):
            return False
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin"):
            # A link on another site may open the page, which has no secret in a new tab.
            is_link = headers.get("sec-fetch-mode") == "navigate" and not changes
            if not is_link or headers.get("sec-fetch-dest") != "document":
                return False
        if not changes:
            return True
        return headers.get("origin", "") in (f"http://{host}", f"https://{host}")

    def session_of(self, now: float, headers: Mapping[str, str]) -> LoginSession | None:
        """Return the session whose secret a request has; None without one, or after its end."""
        key = _digest(headers.get(SESSION_HEADER, ""))
        found = self._sessions.get(key)
        if found is not None and now >= found.ends_at:
            del self._sessions[key]
            return None
        return found

    # Sessions.

    def log_in(self, now: float, token: str) -> str | None:
        """Return the secret of a new session, or None for a wrong token."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        secret = secrets.token_urlsafe(SECRET_BYTES)
        self._sessions[_digest(secret)] = LoginSession(now)
        while len(self._sessions) > SESSIONS_MAX:
            _, oldest = self._sessions.popitem(last=False)
            oldest.end()
        return secret

    def log_out(self, session: LoginSession) -> None:
        """End a session."""
        for key in [key for key, one in self._sessions.items() if one is session]:
            del self._sessions[key]
        session.end()


def random_token() -> str:
    """Return a login token that nobody can guess and a person can type."""
    return secrets.token_hex(TOKEN_BYTES)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
