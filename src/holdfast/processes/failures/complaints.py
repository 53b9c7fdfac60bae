"""Detects whether the last output of a worker blames a peer; then the worker most likely failed because of it.

This is a heuristic, as in `tracebacks`: it knows names of exceptions, and the messages of sockets,
Gloo, NCCL, PyTorch's stores and its watchdogs. In a chain of exceptions the first one counts: a
`ValueError` during whose handling a pipe broke is a `ValueError`.
"""

from __future__ import annotations

import re

from holdfast.processes.failures import tracebacks

# Exceptions that always blame a peer, by their last name.
_OF_PEERS = frozenset(
    {
        "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError",
        "ConnectionResetError", "DistNetworkError", "DistStoreError", "EOFError",
        "IncompleteReadError", "StoreTimeoutError", "TimeoutError", "timeout",
    }
)  # fmt: skip
# Exceptions whose text may blame a peer; the text of any other is ignored.
_OF_ANYTHING = frozenset(
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
_CAUGHT_BY_NOBODY = re.compile(r"terminate called after throwing|libc\+\+abi: terminating")
# How many lines at the end of stderr count if there is no traceback.
LINES_MAX = 12


def first_exception(traceback: str) -> str:
    """Return the line of the first exception in a chain of tracebacks."""
    return tracebacks.exception_line(tracebacks.first_of_chain(traceback))


def is_about_a_peer(exception: str) -> bool:
    """Whether the line of an exception, `type: text`, blames a peer."""
    name, _, text = exception.partition(":")
    last = name.strip().rpartition(".")[2]
    return last in _OF_PEERS or (last in _OF_ANYTHING and _speaks_of_a_peer(text))


def ends_about_a_peer(stderr: str) -> bool:
    """Whether the last lines of a program without a traceback blame a peer."""
    tail = "\n".join(tracebacks.readable_lines(stderr)[-LINES_MAX:])
    return _speaks_of_a_peer(tail)


def aborts_about_a_peer(stderr: str) -> bool:
    """Whether the last lines of a program that aborted blame a peer, as PyTorch's watchdogs do."""
    text = "\n".join(tracebacks.readable_lines(stderr))
    found = _CAUGHT_BY_NOBODY.search(text)
    return found is not None and _speaks_of_a_peer(text[found.start() :])


def _speaks_of_a_peer(text: str) -> bool:
    # Compiled on first use: most jobs never need it.
    return re.search(_WORDS, text, re.IGNORECASE | re.VERBOSE) is not None
