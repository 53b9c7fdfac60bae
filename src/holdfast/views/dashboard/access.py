"""Who may use a dashboard: the login token, sessions, and which requests are a page of ours.

A browser sends what any page tells it to, cookies included. So besides the session there are these
rules, and each is checked for every request before anything else is done:

==========================  ==================================================================
requested by our own name   `Host` is an address, `localhost`, or a name that the dashboard was
                            given: a stranger's name that means 127.0.0.1 (DNS rebinding) is not
from a page of ours         a request that changes something has our `Origin`, and no request
                            comes from another site (`Sec-Fetch-Site`)
by somebody who logged in   the cookie of a session: HttpOnly, SameSite=Strict, never in a URL
on purpose                  a request that changes something has the session's own word in a
                            header, which no form and no other origin can send
==========================  ==================================================================

Pure: the time is an argument. The login token is drawn for each dashboard and is not the job's: that
one lets a program join the job, and has no business in a browser; jobs on loopback have none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from holdfast.net.http_server import is_asked_for

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_BYTES = 20
SESSION_BYTES = 32
SESSION_S = 12 * 3600.0
"""A session ends then, however much it is used."""
SESSIONS_MAX = 32
"""One more, and the oldest ends."""
LOGIN_FAILURES_MAX = 10
LOGIN_WINDOW_S = 60.0
"""So many wrong tokens from one address within this time, and the address has to wait."""
ADDRESSES_MAX = 1_024
CSRF_HEADER = "x-holdfast-csrf"


class Session:
    """One browser that has logged in."""

    def __init__(self, now: float) -> None:
        self.ends_at = now + SESSION_S
        self.word = secrets.token_urlsafe(SESSION_BYTES)
        """What requests that change something have in a header."""


class Access:
    """The sessions of a dashboard. `names` are host names by which it may be asked for."""

    def __init__(self, token: str, port: int, names: tuple[str, ...] = ()) -> None:
        self._token = token
        self._names = ("localhost", *(name.lower() for name in names))
        # Browsers do not tell cookies of two ports of a host apart.
        self.cookie = f"holdfast-{port}"
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    # What every request has to be.

    def is_ours(self, headers: Mapping[str, str], *, changes: bool) -> bool:
        """Whether a request was made to this dashboard by a page of it, or by a person."""
        host = headers.get("host", "")
        if not host or not is_asked_for(host, self._names):
            return False
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin"):
            # A link on another site may lead to the page; without the cookie, which is strict.
            is_link = headers.get("sec-fetch-mode") == "navigate" and not changes
            if not is_link or headers.get("sec-fetch-dest") != "document":
                return False
        if not changes:
            return True
        return headers.get("origin", "") in (f"http://{host}", f"https://{host}")

    # Sessions.

    def log_in(self, now: float, token: str, address: str) -> str | None:
        """Return the id of a new session, or None for a wrong token; ask `must_wait` before."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            failures = self._failures.setdefault(address, deque(maxlen=LOGIN_FAILURES_MAX))
            failures.append(now)
            self._failures.move_to_end(address)
            while len(self._failures) > ADDRESSES_MAX:
                self._failures.popitem(last=False)
            return None
        session_id = secrets.token_urlsafe(SESSION_BYTES)
        self._sessions[_digest(session_id)] = Session(now)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session_id

    def must_wait(self, now: float, address: str) -> bool:
        """Whether too many wrong tokens came from an address of late."""
        failures = self._failures.get(address)
        return (
            failures is not None
            and len(failures) == LOGIN_FAILURES_MAX
            and now - failures[0] < LOGIN_WINDOW_S
        )

    def session(self, now: float, session_id: str) -> Session | None:
        """Return the session with this id, unless it is over."""
        key = _digest(session_id)
        found = self._sessions.get(key)
        if found is not None and now >= found.ends_at:
            del self._sessions[key]
            return None
        return found

    def log_out(self, session_id: str) -> None:
        """End a session."""
        self._sessions.pop(_digest(session_id), None)


def is_on_purpose(session: Session, headers: Mapping[str, str]) -> bool:
    """Whether a request has the word of its session."""
    return hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), session.word.encode())


def draw_token() -> str:
    """Return a login token: no guess finds it, and it can be typed."""
    return secrets.token_hex(TOKEN_BYTES)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
