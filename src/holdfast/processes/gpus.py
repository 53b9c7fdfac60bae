"""The utilization of this host's GPUs, for those who watch a job.

NVIDIA's come from `nvidia-smi`, AMD's from `/sys/class/drm`. A driver that is in trouble may block either of
them for good. So a daemon thread reads, at most one at a time, and nobody waits for it. Without GPUs the
class looks for them once.
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.numa.visible_devices import CUDA, visible_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = "nvidia-smi"
QUERY = ("--query-gpu=uuid,utilization.gpu", "--format=csv,noheader,nounits")
DRM = "/sys/class/drm"
EVERY_S = 5.0
"""The minimum time between two reads."""
RETRY_S = 60.0
"""The same after a failure."""
LIMIT_S = 3.0
"""How long nvidia-smi may take; usually it takes a twentieth of a second, but seconds if no process uses a GPU."""
FRESH_S = 15.0
"""Older values are not shown."""
OUTPUT_BYTES_MAX = 64 * 1024


class GpuUtilization:
    """The utilization of the GPUs that this process may use. Call the methods from one thread."""

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        drm: str = DRM,
        *,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._program = _find(environ)
        self._files = sorted(glob.glob(f"{glob.escape(drm)}/card*/device/gpu_busy_percent"))
        self._visible = environ.get(CUDA)
        self._every_s, self._limit_s = every_s, limit_s
        self._due = 0.0 if self._program or self._files else float("inf")
        self._reading: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._found: tuple[float, tuple[float, ...]] = (0.0, ())

    @property
    def shares(self) -> tuple[float, ...]:
        """The utilization of each GPU, from 0 to 1; empty if it is unknown."""
        at, found = self._found
        return found if time.monotonic() - at < FRESH_S else ()

    def refresh(self) -> None:
        """Begin to read the utilization, unless the last value is recent; never blocks."""
        now = time.monotonic()
        if now < self._due or (self._reading is not None and self._reading.is_alive()):
            return
        self._due = now + self._every_s
        self._reading = threading.Thread(target=self._read, name="holdfast-gpus", daemon=True)
        try:
            self._reading.start()
        except RuntimeError:  # No more threads.
            self._reading, self._due = None, now + RETRY_S

    def close(self) -> None:
        """End a read that is in progress."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                _kill(self._process)

    def _read(self) -> None:
        try:
            found = self._of_nvidia() if self._program else _of_amd(self._files)
        except (OSError, ValueError, subprocess.SubprocessError) as problem:
            console.debug(f"cannot read the utilization of GPUs: {console.describe(problem)}")
            self._due = time.monotonic() + RETRY_S
        else:
            self._found = (time.monotonic(), found)

    def _of_nvidia(self) -> tuple[float, ...]:
        with self._lock:
            if self._is_closed:
                return ()
            process = self._process = subprocess.Popen(
                [self._program, *QUERY],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise
        finally:
            # A process that the kernel does not let go keeps this thread, so no other is started.
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            with self._lock:
                self._process = None
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self._program)
        return parse_nvidia(output[:OUTPUT_BYTES_MAX].decode(errors="replace"), self._visible)


def parse_nvidia(text: str, visible: str | None) -> tuple[float, ...]:
    """Return the utilization of the visible GPUs that report one.

    Raise `ValueError` for a line of another form.
    """
    rows = [line.partition(",") for line in text.splitlines() if line.strip()]
    if visible is not None:
        numbers = visible_numbers(visible, [name.strip() for name, _, _ in rows])
        rows = [rows[number] for number in numbers]
    # A GPU that is divided into instances has no utilization: "[N/A]".
    return tuple(
        _share(value) for _, comma, value in rows if not (comma and value.strip().startswith("["))
    )


def _of_amd(files: list[str]) -> tuple[float, ...]:
    found = []
    for path in files:
        with open(path) as file:
            found.append(_share(file.read(16)))
    return tuple(found)


def _share(percent: str) -> float:
    return min(100, max(0, int(percent))) / 100


def _find(environ: Mapping[str, str]) -> str:
    """Return the path of nvidia-smi on the PATH, never in a relative folder; empty if there is none."""
    paths = (os.path.join(folder, PROGRAM) for folder in os.get_exec_path(environ))
    return next((one for one in paths if os.path.isabs(one) and os.access(one, os.X_OK)), "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass  # It has exited meanwhile.
