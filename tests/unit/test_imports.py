"""The modules that a start loads in a fresh interpreter.

`--version` may load only a few modules. A whole job, and `@record` in a worker, must not load heavy subsystems
that they do not use.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

VERSION_MODULES_MAX = 8

# Subsystems that a plain job of one node does not use.
HEAVY = {
    "asyncio", "concurrent", "email", "http", "importlib.metadata", "logging", "msgspec",
    "multiprocessing", "numpy", "ssl", "torch", "unittest", "urllib", "uuid",
}  # fmt: skip

PROGRAM = """
import sys
bare = set(sys.modules)
{body}
postponed = [name for name, one in sys.modules.items() if type(one).__name__ == "PostponedModule"]
print("loaded", *sorted(set(sys.modules).difference(bare, postponed)))
"""


def loaded_by(body: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after these statements."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    word, *modules = done.stdout.splitlines()[-1].split()
    assert word == "loaded"
    return set(modules)


def heavy_among(modules: set[str]) -> set[str]:
    return {name for name in HEAVY if any(f"{one}.".startswith(f"{name}.") for one in modules)}


def command(*words: str) -> str:
    return (
        "from holdfast.cli.main import POSTPONED, dispatch, postpone; postpone(*POSTPONED)\n"
        f"assert dispatch({list(words)!r}) == 0"
    )


def test_heavy_import_is_detected() -> None:
    assert heavy_among(loaded_by("import asyncio.events")) >= {"asyncio"}
    assert heavy_among({"jsonpatch", "torchaudio"}) == set()


def test_importing_the_package_loads_only_itself() -> None:
    assert loaded_by("import holdfast") <= {"__future__", "holdfast"}


def test_version_loads_few_modules() -> None:
    modules = loaded_by(command("--version"))
    assert not heavy_among(modules)
    assert len(modules) <= VERSION_MODULES_MAX, sorted(modules)


@pytest.mark.parametrize("flags", [[], ["--nproc-per-node", "2"], ["--standalone"]])
def test_plain_job_loads_no_heavy_subsystem(flags: list[str]) -> None:
    modules = loaded_by(command("run", *flags, "--no-python", "/bin/true"))
    assert not heavy_among(modules)


def test_recording_errors_loads_no_heavy_subsystem_in_worker() -> None:
    modules = loaded_by("from holdfast import record; record(print)")
    assert not heavy_among(modules)


def test_plain_job_executes_no_postponed_module_before_it_stops_its_workers() -> None:
    names = loaded_by(
        f"{command('run', '--no-python', '/bin/true')}\n"
        "from holdfast.cli.main import PostponedModule\n"
        "executed = {name for name in POSTPONED if type(sys.modules[name]) is not PostponedModule}\n"
        "assert executed == {'holdfast.core.stopping'}, executed"
    )
    assert "holdfast.core.stopping" in names


def test_postponed_module_is_executed_in_place_at_its_first_use() -> None:
    loaded_by(
        "from holdfast.cli.main import postpone; postpone('typing', 'sys')\n"
        "import typing; from typing import TYPE_CHECKING; early = typing\n"
        "assert not TYPE_CHECKING and 'Any' not in vars(early)\n"
        "from typing import Any, NamedTuple\n"
        "assert sys.modules['typing'] is early and early.Any is Any and type(early) is type(sys)\n"
        "assert not hasattr(early, 'nothing') and typing.get_type_hints(NamedTuple('N', [('a', Any)]))"
    )


def test_postponed_extension_package_and_frozen_module_have_all_their_names() -> None:
    loaded_by(
        "from holdfast.cli.main import postpone; postpone('array', 'json', 'runpy')\n"
        "import array, json.decoder, runpy; from json import loads\n"
        "assert array.array('i', [1])[0] == 1 and loads('[1]') == json.loads('[1]') == [1]\n"
        "assert runpy.run_path and runpy.__spec__"
    )


def test_plug_ins_can_import_a_postponed_module_by_its_full_name() -> None:
    """Importing torch does; the import statement only binds `importlib`."""
    loaded_by(
        "from holdfast.cli.main import bind_postponed, postpone; postpone('importlib.metadata')\n"
        "import importlib; bind_postponed(); import importlib.metadata\n"
        "assert importlib.metadata.version('msgspec')"
    )


def test_postponed_package_is_not_executed_for_its_postponed_modules() -> None:
    loaded_by(
        "from holdfast.cli.main import PostponedModule, postpone\n"
        "postpone('holdfast.store', 'holdfast.store.tcp', 'holdfast.store.tcp.embedded')\n"
        "from holdfast.store.tcp import embedded; import holdfast.store.store_errors\n"
        "assert type(embedded) is type(sys.modules['holdfast.store']) is PostponedModule\n"
        "from holdfast.store import MemoryStore; from holdfast.store.tcp import store_server\n"
        "assert embedded.HostAccess and store_server.ServingLoop and MemoryStore\n"
        "assert type(embedded) is type(sys.modules['holdfast.store']) is type(sys)"
    )


def test_main_thread_is_the_one_that_executes_postponed_threading() -> None:
    run = ["run", "--tee", "3", "--no-python", "/bin/echo", "hello"]
    loaded_by(
        "from holdfast.cli.main import POSTPONED, dispatch, postpone; postpone(*POSTPONED)\n"
        f"assert dispatch({run!r}) == 0\n"
        "import threading; assert threading.main_thread() is threading.current_thread()"
    )
    sources = Path(holdfast.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "start_new_thread" in path.read_text()]


def test_postponed_module_that_failed_is_executed_again(tmp_path: Path) -> None:
    program = "import os, sys\nif not hasattr(sys, 'tried'):\n    sys.tried = 1; 1 / 0\nlast = 2\n"
    (tmp_path / "hasty.py").write_text(program)
    loaded_by(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from holdfast.cli.main import postpone; postpone('hasty'); import hasty\n"
        "try: hasty.last\n"
        "except ZeroDivisionError: assert hasty.last == 2 and type(hasty) is type(sys)"
    )
