"""Dashboards of real jobs: `holdfast dashboard` as a process, and a client that sends arbitrary requests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from holdfast.views.dashboard.access import SESSION_HEADER
from real_jobs import HOLDFAST, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Self


POLL_S = 0.05


def await_agents(*pids: int) -> str:
    """Wait until these agents can be found on this machine; return the run id of their job."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        # In a separate process, because a browser's driver may run an event loop in this one.
        listed = subprocess.check_output([*HOLDFAST, "ps", "--agents", "--json"], text=True)
        found = [json.loads(line) for line in listed.splitlines()]
        ours = [str(one["job"]) for one in found if one["pid"] in pids]
        if len(ours) == len(pids):
            return ours[0]
        assert time.monotonic() < deadline, found
        time.sleep(POLL_S)


class Answer(NamedTuple):
    """The response of a server."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """A client of a dashboard. `output` is what the dashboard printed: its address and token file."""

    def __init__(self, output: str) -> None:
        self.output = output
        self.address = re.findall(r"http://\S+", output)[0]
        self.token_file = re.findall(r"token is in ([^\s)]+)", output)[0]
        with open(self.token_file) as file:
            self.token = file.read().strip()
        place = urlsplit(self.address)
        self.host, self.port = place.hostname or "", place.port or 0
        self.session: dict[str, str] = {}

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    def log_in(self) -> Answer:
        """Open a session."""
        answer = self.send(
            "POST", "/login", {"Origin": self.origin}, f"token={self.token}".encode()
        )
        assert answer.status == 200, answer
        self.session = {SESSION_HEADER: answer.json()["secret"]}
        return answer

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request as a logged-in page does."""
        return self.send("GET", path, {**self.session, **(headers or {})})

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request that changes something, as a logged-in page does; omit empty headers."""
        sent = {
            **self.session,
            "Origin": self.origin,
            "Content-Type": "application/json",
            **(headers or {}),
        }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, {name: value for name, value in sent.items() if value}, data)

    def send(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """Send exactly this, and `Host` unless it is among the headers."""
        connection = self.open()
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        with response:
            answer = Answer(response.status, response.headers, response.read())
        connection.close()
        return answer

    def stream(self, path: str) -> http.client.HTTPResponse:
        """Start to read a stream of the session."""
        connection = self.open()
        connection.request("GET", path, headers={**self.session, "Connection": "close"})
        response = connection.getresponse()
        assert response.status == 200
        return response

    def open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)


class Dashboard(Browser):
    """One `holdfast dashboard`, which always exits with the test."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        command: Sequence[str] = (*HOLDFAST, "dashboard", "--port", "0"),
    ) -> None:
        self.errors = folder / f"dashboard-{len(list(folder.iterdir()))}.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        output = ""
        while "token is in" not in output:
            line = self.process.stdout.readline()
            assert line, f"{output}{self.errors.read_text()}"  # It has exited.
            output += line
        super().__init__(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End it as Ctrl-C does; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert not os.path.exists(self.token_file)
        return code
