from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import types
from typing import TYPE_CHECKING

import functions_to_call as fns
import pytest

from holdfast.errors import UsageError
from holdfast.processes.workers import function_child

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
