from __future__ import annotations

import os
import select
import time

from holdfast.processes.workers.group import Watching


def test_one_descriptor_tells_of_many() -> None:
    watching = Watching()
    pipes = [os.pipe() for _ in range(2)]
    heard: list[bytes] = []
    for read, _ in pipes:
        watching._watch(read, lambda read=read: heard.append(os.read(read, 9)))  # type: ignore[misc]
    assert select.select([watching.fileno()], [], [], 0)[0] == []
    for number, (_, write) in enumerate(pipes):
        os.write(write, b"%d" % number)
    watching._block(time.monotonic() + 60)
    watching._take_what_is_ready()
    assert sorted(heard) == [b"0", b"1"]
    watching._end_watching()
    for fd in sum(pipes, ()):
        os.close(fd)


def test_what_one_reader_ends_is_not_read_any_more() -> None:
    watching = Watching()
    pipes = [os.pipe() for _ in range(2)]
    heard: list[int] = []

    def hear(read: int) -> None:
        heard.append(read)
        for one, _ in pipes:
            watching._unwatch(one)

    for read, write in pipes:
        watching._watch(read, lambda read=read: hear(read))  # type: ignore[misc]
        os.write(write, b"x")
    watching._take_what_is_ready()
    watching._take_what_is_ready()
    assert len(heard) == 1
    watching._end_watching()
    for fd in sum(pipes, ()):
        os.close(fd)
