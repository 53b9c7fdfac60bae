"""What a killed keeper leaves; each in a program of its own, which adopts as a whole."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 60
# A daemon that is hard to find: forked twice, in a session of its own, deaf to SIGTERM.
LEAVES_DAEMON = """
import os, signal
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(write, str(os.getpid()).encode())
        while True:
            signal.pause()
    os._exit(0)
os.wait()
print(os.read(read, 100).decode(), flush=True)
"""


def run_program(tmp_path: Path, code: str) -> str:
    """Run a program of its own that uses keepers, and return what it wrote."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, path], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    return done.stdout


def test_an_agent_that_adopts_orphans_sweeps_them_up(tmp_path: Path) -> None:
    said = run_program(
        tmp_path,
        f"""
        import os, select, signal, subprocess, sys
        from holdfast.processes.keeper import client
        from holdfast.processes.keeper.main import children_of
        own = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
        client.sweep_after_loss()
        client.become_subreaper_if_wanted()
        client.sweep_after_loss()
        assert own.poll() is None, "swept without being asked to adopt"
        client.adopt_orphans()
        client.become_subreaper_if_wanted()
        keeper = client.Keeper.start()
        read, write = os.pipe()
        argv = [sys.executable, "-c", {LEAVES_DAEMON!r}]
        keeper.spawn(0, argv, env=os.environ, cwd="/", fds={{0: 0, 1: write, 2: 2}})
        daemon = int(os.read(read, 100))
        pidfd = os.pidfd_open(daemon)
        os.kill(keeper.pid, signal.SIGKILL)
        while not keeper.lost:
            select.select([keeper.fileno()], [], [])
            keeper.receive()
        assert own.poll() is None
        client.sweep_after_loss()
        print(bool(select.select([pidfd], [], [], 0)[0]), children_of(os.getpid()))
        """,
    )
    assert said == "True []\n"
