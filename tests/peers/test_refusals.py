"""If TorchElastic refuses something, Holdfast refuses it with the same type of error and the same facts.

The wording is Holdfast's. A type of torch corresponds to Holdfast's type of the same name.
"""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("signals_as_before")]

SIDES = ("torch.distributed", "holdfast")


class Side:
    """TorchElastic's names, in torch or in Holdfast."""

    def __init__(self, root: str, folder: Path) -> None:
        self.root, self.folder = root, folder

    def __call__(self, module: str) -> Any:
        return importlib.import_module(f"{self.root}.{module}")

    def parameters(self, **known: Any) -> Any:
        given = {"backend": "mine", "endpoint": "", "run_id": "job", "min_nodes": 1, "max_nodes": 1}
        return self("elastic.rendezvous").RendezvousParameters(**(given | known))

    def registry(self, *creators: Callable[[Any], Any]) -> Any:
        made = self("elastic.rendezvous").RendezvousHandlerRegistry()
        for creator in creators:
            made.register("mine", creator)
        return made

    def backend(self, kind: str, **known: Any) -> Any:
        module = self(f"elastic.rendezvous.{kind}_rendezvous_backend")
        return module.create_backend(self.parameters(**known))

    def endpoint(self, text: str) -> Any:
        return self("elastic.rendezvous.utils").parse_rendezvous_endpoint(text, 123)

    def timeout(self, **known: Any) -> Any:
        return self("elastic.rendezvous.dynamic_rendezvous").RendezvousTimeout(**known)

    def static(self, endpoint: str) -> Any:
        module = self("elastic.rendezvous.static_tcp_rendezvous")
        return module.create_rdzv_handler(self.parameters(backend="static", endpoint=endpoint))

    def failure(self, error_file: str) -> Any:
        path = self.folder / "error.json"
        path.write_text(error_file)
        kind = self("elastic.multiprocessing.errors").ProcessFailure
        return kind(local_rank=0, pid=1, exitcode=1, error_file=str(path))

    def start(self, program: str, log_dir: Path | None = None) -> Any:
        module = self("elastic.multiprocessing")
        specs = module.DefaultLogsSpecs(log_dir=str(log_dir or self.folder))
        return module.start_processes(
            name="it", entrypoint=program, args={0: ()}, envs={0: {}}, logs_specs=specs
        )

    def store(self, **known: Any) -> Any:
        module = self("elastic.utils.distributed")
        return module.create_c10d_store(server_addr="localhost", **known)

    @property
    def file(self) -> Path:
        path = self.folder / "a file"
        path.write_text("#! not a program")
        return path


class Handler:
    def get_backend(self) -> str:
        return "another"

    get_run_id = is_closed = next_rendezvous = num_nodes_waiting = set_closed = shutdown = (
        get_backend
    )


def _endpoint(text: str) -> Callable[[Side], Any]:
    return lambda on: on.endpoint(text)


CASES: dict[str, tuple[Callable[[Side], Any], tuple[str, ...]]] = {
    "no backend": (lambda on: on.parameters(backend=""), ()),
    "too few nodes": (lambda on: on.parameters(min_nodes=-5), ("-5",)),
    "max below min": (lambda on: on.parameters(min_nodes=37, max_nodes=26), ("37", "26")),
    "not a switch": (lambda on: on.parameters(some="Ture").get_as_bool("some"), ("some",)),
    "a number as switch": (lambda on: on.parameters(some=2).get_as_bool("some"), ("some",)),
    "not a number": (lambda on: on.parameters(some="3b").get_as_int("some"), ("some",)),
    "nameless creator": (lambda on: on.registry().register("", Handler), ()),
    "two creators": (lambda on: on.registry(lambda _: 1, lambda _: 2), ("mine",)),
    "unknown backend": (lambda on: on.registry().create_handler(on.parameters()), ("mine",)),
    "another's handler": (
        lambda on: on.registry(lambda _: Handler()).create_handler(on.parameters()),
        ("mine", "another"),
    ),
    **{
        f"endpoint {text}": (_endpoint(text), (text,))
        for text in ("~", "some.host :123", ":123", "some.host:", "some.host:-1", "some.host:65536")
    },
    "timeout of zero": (lambda on: on.timeout(join=timedelta(0)), ("join",)),
    "negative timeout": (lambda on: on.timeout(close=timedelta(seconds=-1)), ("close",)),
    "unknown store": (lambda on: on.backend("c10d", store_type="some"), ()),
    "c10d: no read timeout": (lambda on: on.backend("c10d", read_timeout="0"), ()),
    "c10d: no server": (
        lambda on: on.backend("c10d", endpoint="localhost:1", is_host="false", read_timeout="1"),
        (),
    ),
    "static: no port": (lambda on: on.static("some.host"), ()),
    "static: no endpoint": (lambda on: on.static(""), ()),
    "error file: not JSON": (lambda on: on.failure("{"), ()),
    "error file: empty": (lambda on: on.failure(""), ()),
    "error file: unknown": (lambda on: on.failure('{"some": 1}'), ()),
    "no program": (lambda on: on.start("/nowhere/program"), ("/nowhere/program",)),
    "no program in PATH": (lambda on: on.start("nowhere_program"), ("nowhere_program",)),
    "not executable": (lambda on: on.start(str(on.file)), ("a file",)),
    "program is a folder": (lambda on: on.start("/etc"), ("/etc",)),
    "log folder is a file": (lambda on: on.start("true", on.file), ("a file",)),
    "log folder below a file": (lambda on: on.start("true", on.file / "logs"), ("a file",)),
    "invalid streams": (lambda on: on("elastic.multiprocessing").Std.from_str("0:1,"), ("0:1,",)),
    "not a libc stream": (
        lambda on: on("elastic.multiprocessing.redirects").redirect("some", "x").__enter__(),
        ("some",),
    ),
    "no file to redirect to": (
        lambda on: (
            on("elastic.multiprocessing.redirects").redirect("stdout", "/no/file").__enter__()
        ),
        ("/no/file",),
    ),
    "store: no port": (lambda on: on.store(is_server=True, world_size=2), ("server_port", "2")),
    "three numbers of nodes": (lambda on: on("run").parse_min_max_nnodes("2:20:30"), ()),
    "not a number of nodes": (lambda on: on("run").parse_min_max_nnodes("some"), ("some",)),
    "unknown devices": (lambda on: on("run").determine_local_world_size("some"), ("some",)),
    "module without Python": (
        lambda on: on("run").main(["--no-python", "--module", "some"]),
        ("--module",),
    ),
    "unknown logs": (lambda on: on("run").main(["--logs-specs=some", "x.py"]), ("some",)),
    "no variable": (
        lambda on: on("elastic.utils").get_env_variable_or_raise("NOT_SET_HERE"),
        ("NOT_SET_HERE",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_errors_have_the_same_types_and_facts(case: str, tmp_path: Path) -> None:
    call, facts = CASES[case]
    raised: list[BaseException] = []
    for root in SIDES:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (its type is compared below)
            call(Side(root, tmp_path))
        raised.append(caught.value)
    theirs, ours = raised
    names = [kind.__name__ for kind in type(ours).__mro__]
    assert isinstance(ours, type(theirs)) or type(theirs).__name__ in names
    for fact in facts:
        assert fact in str(ours)
        assert fact in str(theirs)
    if isinstance(theirs, OSError) and theirs.errno is not None:
        assert (ours.errno, ours.filename) == (theirs.errno, theirs.filename)  # type: ignore[attr-defined]


def test_store_errors_are_also_torchs_if_torch_is_loaded(tmp_path: Path) -> None:
    from torch.distributed import DistNetworkError, DistStoreError

    ours = Side("holdfast", tmp_path)
    with pytest.raises(DistNetworkError):
        ours.store(is_server=False, server_port=1, timeout=1)
    with pytest.raises(DistStoreError):
        ours.store(is_server=True, server_port=0, world_size=2, timeout=1)
    with socket.create_server(("localhost", 0)) as silent, pytest.raises(DistNetworkError):
        ours.store(is_server=False, server_port=silent.getsockname()[1], timeout=1)
    first = ours.store(is_server=True, server_port=0, wait_for_workers=False)
    with first, pytest.raises(DistNetworkError):
        ours.store(is_server=True, server_port=first.port, timeout=1)
