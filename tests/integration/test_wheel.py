"""The wheel, installed alone into a new environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
INSTALL = ("install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the programs of the new environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("holdfast_run-*.whl")
    venv.create(folder / "env", symlinks=True)
    python = str(folder / "env" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *INSTALL, wheel], check=True)
    [packages] = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)  # The only dependency.
    return Path(python).parent


@pytest.mark.parametrize("command", ["holdfast run", "holdfast-run"])
def test_readmes_example_runs_from_the_wheel(programs: Path, command: str, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    [script] = re.findall(r'```python title="train.py"\n(.*?)```', readme, re.DOTALL)
    [arguments] = re.findall(r"<!-- run -->\n```console\n\$ holdfast run (.*)\n", readme)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        f"{command} {arguments}", shell=True, cwd=tmp_path, capture_output=True, text=True,
        env={"HOME": str(tmp_path), "PATH": f"{programs}{os.pathsep}{os.defpath}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "RuntimeError: no data for this rank" in done.stderr
