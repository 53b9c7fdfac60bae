from __future__ import annotations

from itertools import combinations

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.numa.affinity import (
    MODES,
    Cpu,
    Machine,
    NumaNode,
    cpus_of,
    format_ranges,
    parse_ranges,
)
from synthetic_machines import FOUR_NODES, MACHINES, NO_SMT, ODD, TWO_SOCKETS, Shape


def machine_of(shape: Shape) -> Machine:
    """Return the machine that a shape describes, without its files."""

    def cpu(number: int) -> Cpu:
        core = number % shape.cores
        socket = core // shape.cores_per_node // shape.nodes_per_socket
        return Cpu(number, core, socket, shape.complex_of(core).start)

    return Machine(
        tuple(
            NumaNode(node, tuple(map(cpu, shape.threads(shape.cores_of(node)))))
            for node in range(shape.nodes)
        ),
        tuple(max(0, node) for node in shape.gpus),
    )


def ranges(shape: Shape, mode: str, allowed: str = "0-999") -> list[str]:
    """Return what each worker gets, as the kernel would write it."""
    machine, may = machine_of(shape), parse_ranges(allowed)
    return [format_ranges(cpus_of(machine, mode, gpu, may)) for gpu in range(len(shape.gpus))]


def test_node() -> None:
    assert ranges(TWO_SOCKETS, "node") == ["0-31,64-95"] * 4 + ["32-63,96-127"] * 4
    low, high = ["16-31,80-95", "0-15,64-79"], ["48-63,112-127", "32-47,96-111"]
    assert ranges(FOUR_NODES, "node") == [one for one in (*low, *high) for _ in range(2)]


def test_socket() -> None:
    assert ranges(TWO_SOCKETS, "socket") == ranges(TWO_SOCKETS, "node")
    assert ranges(FOUR_NODES, "socket") == ["0-31,64-95"] * 4 + ["32-63,96-127"] * 4


def test_exclusive_divides_the_cores_with_all_their_threads() -> None:
    assert ranges(TWO_SOCKETS, "exclusive")[:5] == [
        "0-7,64-71", "8-15,72-79", "16-23,80-87", "24-31,88-95", "32-39,96-103",
    ]  # fmt: skip
    assert ranges(FOUR_NODES, "exclusive")[:4] == [
        "16-23,80-87", "24-31,88-95", "0-7,64-71", "8-15,72-79",
    ]  # fmt: skip


def test_exclusive_gives_what_is_left_over_to_the_lowest_gpus() -> None:
    # 21 cores for six GPUs: three get four of them, three get three.
    assert ranges(ODD, "exclusive") == [
        "0-3,42-45", "21-31,63-73", "4-7,46-49", "8-11,50-53",
        "32-41,74-83", "12-14,54-56", "15-17,57-59", "18-20,60-62",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", MACHINES.values(), ids=MACHINES)
def test_exclusive_cpus_are_of_one_worker_alone_and_none_is_wasted(shape: Shape) -> None:
    machine = machine_of(shape)
    gpus = range(len(shape.gpus))
    given = [set(cpus_of(machine, "exclusive", gpu, shape.cpus)) for gpu in gpus]
    assert all(one.isdisjoint(other) for one, other in combinations(given, 2))
    assert set().union(*given) == set(shape.cpus)


def test_core_complex() -> None:
    assert ranges(TWO_SOCKETS, "core-complex") == ranges(TWO_SOCKETS, "exclusive")
    # 12 cores in groups of 8 and 4: the larger first, and again from the start for the third.
    assert ranges(NO_SMT, "core-complex") == ["0-7", "8-11", "12-19", "20-23", "12-19"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", MACHINES.values(), ids=MACHINES)
def test_only_cpus_that_may_be_used_are_chosen(shape: Shape, mode: str) -> None:
    allowed = set(shape.cpus[::3])
    machine = machine_of(shape)
    for gpu in range(len(shape.gpus)):
        chosen = set(cpus_of(machine, mode, gpu, allowed))
        assert chosen
        assert chosen <= allowed


def test_a_core_is_named_by_its_lowest_thread_even_if_that_may_not_be_used() -> None:
    # Of core 0 only the second thread may be used; it is still the first core.
    assert ranges(TWO_SOCKETS, "exclusive", "1-3,32-95,100")[0] == "1-3,64-71"
    assert ranges(TWO_SOCKETS, "exclusive", "1-3,32-63,64-67,120-127")[:4] == [
        "64", "1,65", "2,66", "3,67",
    ]  # fmt: skip


def test_a_node_without_usable_cpus_does_not_spoil_the_others() -> None:
    """Memory that is a node of its own, as some machines have it, or a part kept from us."""
    whole = machine_of(FOUR_NODES)
    machine = Machine((*whole.nodes, NumaNode(4, ())), whole.gpus)
    assert format_ranges(cpus_of(machine, "socket", 0, range(16, 128))) == "16-31,64-95"
    assert format_ranges(cpus_of(machine, "socket", 0, range(16, 32))) == "16-31"


@pytest.mark.parametrize(
    ("mode", "gpu", "allowed"),
    [("node", 4, range(32)), ("node", 8, range(128)), ("exclusive", 0, [0, 1, 2, 64])],
    ids=["no CPU near the GPU", "no such GPU", "fewer cores than GPUs"],
)
def test_what_cannot_be_bound_is_an_error(mode: str, gpu: int, allowed: list[int]) -> None:
    with pytest.raises(EnvironmentProblem):
        cpus_of(machine_of(TWO_SOCKETS), mode, gpu, allowed)


def test_what_the_kernel_does_not_tell_is_an_error_where_it_is_needed() -> None:
    machine = Machine((NumaNode(0, (Cpu(0, 0, None, None),)),), (0,))
    assert cpus_of(machine, "node", 0, [0]) == [0]
    assert cpus_of(machine, "exclusive", 0, [0]) == [0]
    with pytest.raises(EnvironmentProblem):
        cpus_of(machine, "socket", 0, [0])
    with pytest.raises(EnvironmentProblem):
        cpus_of(machine, "core-complex", 0, [0])


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("5", [5]), ("0-2", [0, 1, 2]), ("0-1,4,6-7", [0, 1, 4, 6, 7])]
)
def test_ranges(text: str, numbers: list[int]) -> None:
    assert parse_ranges(f"{text}\n") == numbers
    assert format_ranges(reversed(numbers)) == text
