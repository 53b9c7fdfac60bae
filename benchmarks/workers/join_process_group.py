"""A worker that joins the process group repeatedly, as `init_process_group` does with `env://`.

It writes a stamp each time it is ready (generations 0, 2, ...) and each time it has joined the group
(generations 1, 3, ...). Before each join it waits for a byte at the gate. Each join has its own key prefix.
"""

import os
from time import monotonic_ns

from torch import distributed

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
stamps = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY)
gate = os.open(os.environ["BENCH_GATE"], os.O_RDONLY)


def stamp(number: int) -> None:
    os.write(stamps, f"{number} {rank} {os.getpid()} {monotonic_ns()}\n".encode())


stamp(0)
for number in range(int(os.environ["BENCH_TIMES"])):
    os.read(gate, 1)
    store = distributed.TCPStore(address, port, size, is_master=False)
    distributed.init_process_group(
        "gloo", store=distributed.PrefixStore(str(number), store), rank=rank, world_size=size
    )
    stamp(2 * number + 1)
    distributed.barrier()  # No worker leaves before all have joined.
    distributed.destroy_process_group()
    stamp(2 * number + 2)
os._exit(0)
