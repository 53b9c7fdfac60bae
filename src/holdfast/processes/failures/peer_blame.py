"""Detects whether the last output of a worker blames a peer, which then most likely caused the failure.

This is a heuristic, as in `tracebacks`: it knows names of exceptions, and the messages of sockets,
Gloo, NCCL, PyTorch's stores and its watchdogs. In a chain of exceptions the first one counts: if
a pipe breaks while a `ValueError` is handled, the `ValueError` counts.
"""

from __future__ import annotations

import re

from holdfast.processes.failures import tracebacks

# Exceptions that always blame a peer, by their last name.
_ALWAYS_BLAME_PEER = frozenset(
    {
        "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError",
        "ConnectionResetError", "DistNetworkError", "DistStoreError", "EOFError",
        "IncompleteReadError", "StoreTimeoutError", "TimeoutError", "timeout",
    }
)  # fmt: skip
# Exceptions whose text may blame a peer; the text of any other is ignored.
_MAY_BLAME_PEER = frozenset(
    {
        "DistBackendError", "DistError", "Exception", "OSError", "IOError", "RuntimeError", "error",
        "SystemError", "StoreError",
    }
)  # fmt: skip
_WORDS = r"""
    connection\s+(?:was\s+|has\s+been\s+)?(?:reset|closed|aborted|refused|lost|dropped|broken)
    | (?:reset|closed|terminated)\s+by\s+(?:the\s+)?(?:peer|remote)
    | broken\s+pipe | unexpected\s+(?:eof|end\s+of\s+file) | got\s+0\s+bytes | end\s+of\s+stream
    | remote\s+(?:process|peer|end|host)\s.*?(?:exit|clos|gone|lost|terminat|dead|died)
    | peer\s.*?(?:exit|clos|gone|lost|terminat|dead|died|disconnect|shut)
    | timed?\s?-?out | (?:store|socket|communicator)\s+(?:is|was|has\s+been)\s+(?:closed|aborted)
    | not\s+connected | no\s+route\s+to\s+host | network\s+is\s+unreachable
    | nccl(?:Remote|System)Error | watchdog | heartbeat\s+monitor
    """
_UNCAUGHT = re.compile(r"terminate called after throwing|libc\+\+abi: terminating")
# How many lines at the end of stderr count if there is no traceback.
LINES_MAX = 12


def first_exception(traceback: str) -> str:
    """Return the line of the first exception in a chain of tracebacks."""
    return tracebacks.exception_line(tracebacks.first_of_chain(traceback))


def blames_peer(exception: str) -> bool:
    """Whether the line of an exception, `type: text`, blames a peer."""
    name, _, text = exception.partition(":")
    last = name.strip().rpartition(".")[2]
    return last in _ALWAYS_BLAME_PEER or (last in _MAY_BLAME_PEER and _text_blames_peer(text))


def tail_blames_peer(stderr: str) -> bool:
    """Whether the last lines of a program without a traceback blame a peer."""
    tail = "\n".join(tracebacks.readable_lines(stderr)[-LINES_MAX:])
    return _text_blames_peer(tail)


def abort_blames_peer(stderr: str) -> bool:
    """Whether the last lines of a program that aborted blame a peer, as PyTorch's watchdogs do."""
    text = "\n".join(tracebacks.readable_lines(stderr))
    found = _UNCAUGHT.search(text)
    return found is not None and _text_blames_peer(text[found.start() :])


def _text_blames_peer(text: str) -> bool:
    # Compiled on first use: most jobs never need it.
    return re.search(_WORDS, text, re.IGNORECASE | re.VERBOSE) is not None
