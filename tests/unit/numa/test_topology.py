from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.numa.affinity import Cpu, Machine, NumaNode
from holdfast.numa.topology import node_of, read_machine
from synthetic_machines import MACHINES, Shape, add_pci, address_of, put

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shape", MACHINES.values(), ids=MACHINES)
def test_a_machine_is_read_as_it_is(tmp_path: Path, shape: Shape) -> None:
    shape.build(tmp_path)
    machine = read_machine(str(tmp_path), map(address_of, range(len(shape.gpus))))
    assert machine.gpus == tuple(max(0, node) for node in shape.gpus)
    assert [node.number for node in machine.nodes] == list(range(shape.nodes))
    for node in machine.nodes:
        cores = shape.cores_of(node.number)
        assert [cpu.number for cpu in node.cpus] == shape.threads(cores)
        for cpu in node.cpus:
            core = cpu.number % shape.cores
            socket = node.number // shape.nodes_per_socket
            assert cpu == Cpu(cpu.number, core, socket, shape.complex_of(core).start)


def test_what_the_kernel_does_not_show_is_none(tmp_path: Path) -> None:
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1")
    cpus = (Cpu(0, 0, None, None), Cpu(1, 1, None, None))
    assert read_machine(str(tmp_path), []) == Machine((NumaNode(0, cpus),), ())


@pytest.mark.parametrize(("said", "node"), [(1, 1), (-1, 0), (None, 0)])
def test_a_device_of_unknown_node_is_at_the_first(
    tmp_path: Path, said: int | None, node: int
) -> None:
    add_pci(tmp_path, "0000:07:00.0", "0x10de", "0x030200", said)
    assert node_of(str(tmp_path), "0000:07:00.0") == node
