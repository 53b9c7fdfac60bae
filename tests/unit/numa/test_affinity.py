from __future__ import annotations

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.numa.affinity import Cpu, NumaNode, NumaTopology, cpus_of, format_ranges, parse_ranges
from synthetic_machines import FOUR_NODES, TWO_SOCKETS, Shape


def machine_of(shape: Shape) -> NumaTopology:
    """Return the machine that a shape describes, without its files."""

    def cpu(number: int) -> Cpu:
        core = number % shape.cores
        socket = core // shape.cores_per_node // shape.nodes_per_socket
        return Cpu(number, core, socket, shape.complex_of(core).start)

    return NumaTopology(
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


def test_core_id_is_its_lowest_thread_even_if_unusable() -> None:
    # Of core 0 only the second thread may be used; it is still the first core.
    assert ranges(TWO_SOCKETS, "exclusive", "1-3,32-95,100")[0] == "1-3,64-71"
    assert ranges(TWO_SOCKETS, "exclusive", "1-3,32-63,64-67,120-127")[:4] == [
        "64", "1,65", "2,66", "3,67",
    ]  # fmt: skip


def test_node_without_usable_cpus_does_not_affect_other_nodes() -> None:
    """Some machines have a NUMA node that is only memory; a container may allow no CPU of a node."""
    whole = machine_of(FOUR_NODES)
    machine = NumaTopology((*whole.nodes, NumaNode(4, ())), whole.gpus)
    assert format_ranges(cpus_of(machine, "socket", 0, range(16, 128))) == "16-31,64-95"
    assert format_ranges(cpus_of(machine, "socket", 0, range(16, 32))) == "16-31"


@pytest.mark.parametrize(
    ("mode", "gpu", "allowed"),
    [("node", 4, range(32)), ("node", 8, range(128)), ("exclusive", 0, [0, 1, 2, 64])],
    ids=["no CPU near the GPU", "no such GPU", "fewer cores than GPUs"],
)
def test_impossible_binding_is_an_error(mode: str, gpu: int, allowed: list[int]) -> None:
    with pytest.raises(EnvironmentProblem):
        cpus_of(machine_of(TWO_SOCKETS), mode, gpu, allowed)


def test_missing_topology_is_an_error_if_it_is_needed() -> None:
    machine = NumaTopology((NumaNode(0, (Cpu(0, 0, None, None),)),), (0,))
    assert cpus_of(machine, "node", 0, [0]) == [0]
    assert cpus_of(machine, "exclusive", 0, [0]) == [0]
    with pytest.raises(EnvironmentProblem):
        cpus_of(machine, "socket", 0, [0])
    with pytest.raises(EnvironmentProblem):
        cpus_of(machine, "core-complex", 0, [0])


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("5", [5]), ("0-2", [0, 1, 2]), ("0-1,4,6-7", [0, 1, 4, 6, 7])]
)
def test_ranges_are_parsed_and_formatted(text: str, numbers: list[int]) -> None:
    assert parse_ranges(f"{text}\n") == numbers
    assert format_ranges(reversed(numbers)) == text
