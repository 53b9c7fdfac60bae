from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import types
from multiprocessing import forkserver, process, spawn
from typing import TYPE_CHECKING

import functions_to_call as fns
import pytest

from holdfast.errors import UsageError
from holdfast.processes.workers import function_child
from holdfast.processes.workers.function_workers import file_in_memory

if TYPE_CHECKING:
    from pathlib import Path


def test_a_call_is_packed_with_the_descriptors_it_needs() -> None:
    ours, theirs = multiprocessing.Pipe()
    packed = function_child.pack_call(fns.give, (theirs, 1))
    assert packed.fds == [theirs.fileno()]
    assert packed.passed_fds(70, -1) == {4: 70, 6: theirs.fileno()}
    assert packed.passed_fds(70, 71) == {4: 70, 5: 71, 6: theirs.fileno()}
    fn, args = pickle.loads(packed.data)
    assert fn is fns.give
    assert args[0].fileno() == function_child.ARGUMENTS_FD
    args[0]._handle = None  # It is a descriptor of the worker; here that number is another's.
    theirs.close()
    ours.close()


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(UsageError, match=r"<lambda> cannot be sent") as one:
        function_child.pack_call(lambda: None, ())
    assert one.value.exit_code == 2
    partial = types.SimpleNamespace(__call__=lambda: None)
    with pytest.raises(UsageError, match="namespace"):
        function_child.pack_call(partial, ())  # type: ignore[arg-type]
    # Nothing is left behind that would make a later pickle look like one for a child.
    with pytest.raises(RuntimeError):
        pickle.dumps(multiprocessing.get_context("spawn").Lock())


def test_a_new_interpreter_is_prepared_like_this_one() -> None:
    data = pickle.loads(function_child.pack_preparation("trainer"))
    assert data["name"] == "trainer"
    assert data["sys_path"][1:] == sys.path[1:]
    assert bytes(data["authkey"]) == bytes(process.current_process().authkey)


@pytest.mark.parametrize(("exists", "passed"), [(True, True), (False, False)])
def test_a_main_script_that_is_no_file_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, passed: bool
) -> None:
    """Python names a script that it reads from a pipe `<stdin>`."""
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "<stdin>")
    if exists:
        (tmp_path / "<stdin>").touch()
    monkeypatch.setitem(sys.modules, "__main__", main)
    data = pickle.loads(function_child.pack_preparation("x"))
    assert ("init_main_from_path" in data) == passed
    local = types.FunctionType((lambda: None).__code__, {"__name__": "__main__"})
    assert function_child._needs_value_pickling(local) == (not passed)
    assert not function_child._needs_value_pickling(fns.add)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [(None, 0, ""), (0, 0, ""), (7, 7, ""), (-1, 255, ""), (256, 0, ""), ("why", 1, "why\n")],
)
def test_the_exit_status_is_the_interpreters(
    code: object, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert function_child._exit_status(code) == status
    assert capsys.readouterr().err == said
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"raise SystemExit({code!r})"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (status, said)


def test_a_value_is_sent_as_one_pickle() -> None:
    read, write = os.pipe()
    function_child.call_and_return(fns.add, ([1], [2]), write)
    with open(read, "rb") as stream:
        assert pickle.load(stream) == [1, 2]
        assert stream.read() == b""


def test_nothing_is_sent_for_a_call_that_raises() -> None:
    read, write = os.pipe()
    with pytest.raises(RuntimeError, match="why"):
        function_child.call_and_return(fns.fail, ("why",), write)
    with pytest.raises(SystemExit):
        function_child.call_and_return(fns.leave, (3,), write)
    os.close(write)
    with open(read, "rb") as stream:
        assert stream.read() == b""


def test_an_interpreter_finds_this_package_wherever_it_is(tmp_path: Path) -> None:
    command = function_child.interpreter_command("tracker_fd")
    assert command[0] == os.fsdecode(spawn.get_executable())
    done = subprocess.run([*command], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_to_be_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert function_child.preload_modules() == []
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", ["__main__", "json"])
    assert function_child.preload_modules() == ["json"]


def test_data_in_memory_is_read_from_its_start() -> None:
    data = os.urandom(100_000)
    fd = file_in_memory(data)
    assert not os.get_inheritable(fd)
    with open(fd, "rb") as stream:
        assert stream.read() == data
