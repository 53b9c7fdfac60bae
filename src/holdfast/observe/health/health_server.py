"""The HTTP server of health checks: liveness and readiness as Kubernetes probes them.

====================================  =========================================================
`GET /healthz`, `/livez` and `/`      200 if the agent's loop has responded within `timeout`
`GET /readyz`                         200 if, in addition, the generation's workers are running
====================================  =========================================================

Otherwise the status is 503, with the reason in one line of text. The state is read at the time of the request. A
stopped process does not respond, which is a failed probe too.

Probes use the pod's own address, so the server listens on every address of the machine. It reveals only liveness,
readiness and one line about them, and accepts no input.
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.limits import PORT_MAX
from holdfast.net.http_server import PLAIN, HttpRequest, HttpResponse, HttpServer, listen_tcp
from holdfast.observe.lifecycle import (
    GenerationStarted,
    GenerationStopped,
    GenerationStopping,
    RunEnded,
    WorkerEnded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.observe.lifecycle import LifecycleEvent

PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
TIMEOUT_VARIABLE = "HOLDFAST_HEALTH_TIMEOUT"
TIMEOUT_S = 60
"""How long an agent may be silent before it is considered dead; TorchElastic's default."""
PORT = re.compile("[0-9]{1,20}")
SHOWN_CHARS_MAX = 80

LIVENESS = ("/", "/healthz", "/livez")
READINESS = "/readyz"


class Readiness:
    """An observer of lifecycle events that tracks whether the workers of the current generation are running.

    `why_not` is the `ready_callback` of a health check, which calls it from another thread, so the threads share
    only one string.
    """

    name = "the readiness check"

    def __init__(self) -> None:
        self._reason = "the workers have not started yet"
        self._running: set[int] = set()
        self._generation = -1

    def why_not(self) -> str:
        """Return why the workers are not running; empty if they are."""
        return self._reason

    def __call__(self, event: LifecycleEvent) -> None:
        match event:
            case GenerationStarted():
                self._generation = event.generation
                self._running = {worker.local_rank for worker in event.workers}
                self._reason = "" if self._running else "the node has no workers"
            case WorkerEnded() if event.generation == self._generation:
                self._running.discard(event.worker.local_rank)
                if event.failed:
                    self._reason = f"worker {event.worker.global_rank} has failed"
                elif not self._running and not self._reason:
                    self._reason = "the workers have finished"
            case GenerationStopping() if event.generation >= self._generation:
                self._reason = f"the workers are being stopped: {event.reason.value}"
            case GenerationStopped() if event.generation >= self._generation:
                self._reason = "the workers have stopped and not restarted yet"
            case RunEnded():
                self._reason = "the run has ended"


class HealthCheckServer:
    """Responds to probes from `start` until `stop`. Both may be called at any time and more than once.

    `alive_callback` returns when the agent was last alive, in seconds since 1970. The server's thread calls it for
    each probe, so it must return before a probe times out. After `timeout` seconds the agent is considered dead. Port
    0 is any free port; after `start`, `port` has its number.

    `ready_callback` returns why the workers are not running, or an empty string if they are. Without one, a live
    agent is ready. `host` is the address to listen on, by default every address. `name` is the prefix of the error if
    the port cannot be bound.

    Subclasses may override `start` and `stop`, as subclasses of TorchElastic's class do.
    """

    def __init__(
        self,
        alive_callback: Callable[[], float],
        port: int,
        timeout: float,
        *,
        ready_callback: Callable[[], str] | None = None,
        host: str = "",
        name: str = "health checks",
    ) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._ready_callback = ready_callback
        self._host = host
        self._name = name
        self._server: HttpServer | None = None

    def start(self) -> None:
        """Listen from now on; raise `EnvironmentProblem` if the port cannot be bound."""
        if self._server is not None:
            return
        listener = listen_tcp(self._host, self._port, name=self._name)
        self._server = server = HttpServer(
            listener, self._respond, name=self._name, host_name=self._host
        )
        log = console.info if self._port else console.notice
        log(f"health checks at port {server.port}")

    def stop(self) -> None:
        """Free the port."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    @property
    def alive_callback(self) -> Callable[[], float]:
        """The function that returns when the agent was last alive."""
        return self._alive_callback

    @property
    def port(self) -> int:
        """The port it listens on; before `start`, 0 if any free port was requested."""
        return self._server.port if self._server is not None else self._port

    def _respond(self, request: HttpRequest) -> HttpResponse:
        path = request.path
        if path in LIVENESS:
            reason = self._why_dead()
        elif path == READINESS:
            reason = self._why_dead() or self._why_unready()
        else:
            known = ", ".join((*LIVENESS[1:], READINESS))
            return HttpResponse(404, PLAIN, f"not found; probes: {known}\n".encode())
        if reason:
            return HttpResponse(503, PLAIN, f"{_one_line(reason)}\n".encode())
        return HttpResponse(200, PLAIN, b"ok\n")

    def _why_dead(self) -> str:
        try:
            silent_s = time.time() - self._alive_callback()
        except Exception as problem:  # noqa: BLE001 (a callback may raise anything)
            return f"the liveness check failed: {type(problem).__name__}: {problem}"
        # NaN means dead. A time in the future means alive, because the clock may have been set back.
        if silent_s <= self._timeout:
            return ""
        return f"the agent has not responded for {silent_s:.0f} s"

    def _why_unready(self) -> str:
        if self._ready_callback is None:
            return ""
        try:
            return self._ready_callback()
        except Exception as problem:  # noqa: BLE001 (as above)
            return f"the readiness check failed: {type(problem).__name__}: {problem}"


def create_healthcheck_server(
    alive_callback: Callable[[], float], port: int, timeout: float
) -> HealthCheckServer:
    """Return a server that has not been started."""
    return HealthCheckServer(alive_callback, port, timeout)


def server_from_environment(
    environ: Mapping[str, str],
    alive_callback: Callable[[], float],
    ready_callback: Callable[[], str] | None = None,
) -> HealthCheckServer | None:
    """Return the server that `TORCHELASTIC_HEALTH_CHECK_PORT` configures, without starting it.

    A value that is not a valid port causes a warning, and there is no server.
    """
    given = environ.get(PORT_VARIABLE, "")
    if not given:
        return None
    if not (PORT.fullmatch(given) and int(given) <= PORT_MAX):
        console.warning(
            f"{PORT_VARIABLE}={given[:SHOWN_CHARS_MAX]!r} is not a valid port (0 to {PORT_MAX}); "
            "health checks are off"
        )
        return None
    return HealthCheckServer(
        alive_callback,
        int(given),
        _timeout_from(environ),
        ready_callback=ready_callback,
        name=PORT_VARIABLE,
    )


def _timeout_from(environ: Mapping[str, str]) -> float:
    given = environ.get(TIMEOUT_VARIABLE, "")
    if not given:
        return TIMEOUT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        console.warning(
            f"{TIMEOUT_VARIABLE}={given!r} is not a number of seconds; using {TIMEOUT_S}"
        )
        return TIMEOUT_S
    return seconds


def _one_line(text: str) -> str:
    return " ".join(text.split())
