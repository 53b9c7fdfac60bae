"""Draw `holdfast top` as a picture, on a real job of four nodes that run on this machine.

    python docs/assets/record_top.py docs/assets/top.png

Rank 9 fails once, one node is killed and replaced, and rank 5 is slow. Needs chromium.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.control.discovery import open_job
from holdfast.control.job_client import Endpoint
from holdfast.control.job_feed import JobFeed
from holdfast.net.listening import ReservedPort
from holdfast.views.top.app import Top

COLUMNS, LINES = 126, 38
WIDTH, HEIGHT = 1562, 1000  # Pixels of the picture.
RANKS = 4  # On each node.
LIMIT_S = 90.0
RUN_ID = "nightly"
TRAIN = """
import os, random, time
from holdfast import worker
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first = int(open("step").read()) if os.path.exists("step") else 0
time.sleep(0.4)
for step in range(first, 1_000_000):
    with worker.section("forward"):
        time.sleep(0.45 if rank == 5 and restarts else 0.3)
    worker.progress(step, total=20_000, loss=4 / (1 + step) ** 0.3 + 0.1 * random.random())
    if rank == 0:
        with open("new", "w") as file:
            file.write(str(step))
        os.replace("new", "step")
    if restarts == 0 and rank == 9 and step == 40:
        raise RuntimeError("CUDA error: out of memory")
"""


def start(folder: Path, node: str, port: int) -> subprocess.Popen[bytes]:
    """Start a node."""
    command = (
        *(
            sys.executable,
            "-m",
            "holdfast",
            "run",
            "--nnodes",
            "3:4",
            "--rdzv-id",
            RUN_ID,
            "--rdzv-backend",
            "c10d",
        ),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", str(RANKS)),
        *(
            "--rdzv-conf",
            f"node_id={node}",
            "--max-restarts",
            "10",
            "--log-dir",
            "logs",
            "train.py",
        ),
    )
    log = (folder / f"{node}.log").open("wb")
    return subprocess.Popen(command, cwd=folder, stderr=log, start_new_session=True)


async def draw(port: int, replace: asyncio.Event) -> str:
    """Return the job as `top` shows it, as SVG; set `replace` when a node should be replaced."""
    place = Endpoint(host="127.0.0.1", port=port, run_id=RUN_ID)
    app = Top(lambda job, changed: JobFeed(lambda: open_job(place), job, changed))
    async with app.run_test(size=(COLUMNS, LINES)) as pilot:
        while app.job.header.generation < 1:
            await pilot.pause(0.1)
        await pilot.pause(12.0)
        replace.set()
        while app.job.header.generation < 3:
            await pilot.pause(0.1)
        await pilot.pause(16.0)
        await pilot.press("down", "down", "down", "down", "down")
        await pilot.pause(1.0)
        return app.export_screenshot(title="holdfast top")


async def record(folder: Path, port: int) -> str:
    """Run the job; return the SVG of `top`."""
    (folder / "train.py").write_text(TRAIN)
    nodes = {name: start(folder, name, port) for name in ("gpu-0", "gpu-1", "gpu-2", "gpu-3")}
    try:
        replace = asyncio.Event()
        drawing = asyncio.create_task(draw(port, replace))
        await asyncio.wait_for(replace.wait(), LIMIT_S)
        nodes["gpu-3"].send_signal(signal.SIGKILL)
        await asyncio.sleep(8.0)
        nodes["gpu-4"] = start(folder, "gpu-4", port)
        return await asyncio.wait_for(drawing, LIMIT_S)
    finally:
        for node in nodes.values():
            node.terminate()
        for node in nodes.values():
            node.wait()


def main(picture: str) -> None:
    """Run the job and write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ReservedPort() as reserved:
            port = reserved.number
        (folder / "top.svg").write_text(asyncio.run(record(folder, port)))
        subprocess.run(
            (
                *("chromium", "--headless", "--no-sandbox", "--hide-scrollbars"),
                *(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={Path(picture).absolute()}"),
                f"file://{folder}/top.svg",
            ),
            check=True,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/assets/record_top.py PICTURE.png")
    main(sys.argv[1])
