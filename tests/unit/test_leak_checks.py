"""The checks of `tests/conftest.py` find a leak of each kind, and report nothing if there is no leak."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKY = """
import os, subprocess, threading
kept, end = [], threading.Event()
def test_descriptor():
    kept.append(os.open("/etc/passwd", os.O_RDONLY))
def test_child():
    kept.append(subprocess.Popen(["sleep", "100"]))
def test_unreaped_child():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
def test_orphan_with_a_session_of_its_own():
    subprocess.run(["sh", "-c", "setsid sleep 200 > /dev/null 2>&1 &"])
def test_thread():
    threading.Thread(target=end.wait).start()
def test_that_lets_the_thread_end():
    end.set()
"""

TIDY = """
import os, subprocess, threading
def test_descriptor():
    os.close(os.open("/etc/passwd", os.O_RDONLY))
def test_process():
    subprocess.run(["true"])
def test_orphan_that_ends_soon():
    subprocess.run(["sh", "-c", "setsid sleep 0.2 > /dev/null 2>&1 &"])
def test_thread():
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
def test_file_in_a_cycle_of_references():
    cycle = [open("/etc/passwd")]
    cycle.append(cycle)
"""


def run(folder: Path, tests: str, patience_s: float) -> str:
    text, count = re.subn(
        r"^PATIENCE_S = .*", f"PATIENCE_S = {patience_s}", CONFTEST.read_text(), flags=re.MULTILINE
    )
    assert count == 1
    (folder / "conftest.py").write_text(text)
    (folder / "test_probe.py").write_text(tests)
    (folder / "pytest.ini").touch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout


def test_each_kind_of_leak_is_found_and_processes_are_ended(tmp_path: Path) -> None:
    output = run(tmp_path, LEAKY, patience_s=0.1)
    assert "6 passed, 5 errors" in output
    for leak in (
        r"descriptor \d+: /etc/passwd",
        r"process \d+: sleep 100",
        r"process \d+: \(ended\)",
        r"process \d+: (setsid |sh -c .*)?sleep 200",
        r"thread Thread-1",
    ):
        assert re.search(f"the test left behind: {leak}", output), (
            f"{leak} was not found in {output}"
        )


def test_resources_released_soon_are_not_leaks(tmp_path: Path) -> None:
    assert "5 passed" in run(tmp_path, TIDY, patience_s=30)
