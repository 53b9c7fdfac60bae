"""Whether the last output of a failed worker blames the worker itself or a peer."""

from __future__ import annotations

import pytest

from holdfast.processes.failures import peer_blame

CHAIN = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
{first}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
{last}"""


@pytest.mark.parametrize(
    "line",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError",
        "asyncio.exceptions.IncompleteReadError: 0 bytes read on a total of 8 expected bytes",
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4021",
        "RuntimeError: [pair.cc:446] Read timeout: timed out after 1800000ms",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistBackendError: remote process exited or there was a network error",
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//1",
        "RuntimeError: NCCL communicator was aborted on rank 1.",
    ],
)
def test_peer_exceptions_are_recognized(line: str) -> None:
    assert peer_blame.blames_peer(line)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: the timeout must be positive",
        "KeyError: 'peer closed'",
        "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB",
        "torch.OutOfMemoryError: CUDA out of memory",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data'",
        "AssertionError",
        "",
    ],
)
def test_other_exceptions_do_not_blame_a_peer(line: str) -> None:
    assert not peer_blame.blames_peer(line)


def test_first_exception_of_a_chain_decides_whom_it_blames() -> None:
    own = CHAIN.format(first="ValueError: shape", last="BrokenPipeError: [Errno 32] Broken pipe")
    assert peer_blame.first_exception(own) == "ValueError: shape"
    peer = CHAIN.format(first="ConnectionResetError: reset", last="RuntimeError: step 7 failed")
    assert peer_blame.first_exception(peer) == "ConnectionResetError: reset"


def test_watchdog_abort_blames_a_peer() -> None:
    output = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG 0] Process group watchdog thread terminated with exception: timeout\n"
    )
    assert peer_blame.abort_blames_peer(output)
    assert not peer_blame.abort_blames_peer("double free or corruption (out)\n")
