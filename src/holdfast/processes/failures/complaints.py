"""Whether what a worker said as it failed is about a peer: most likely it failed of another's end.

It reads by habit, as `tracebacks` does: names of exceptions, and the words that sockets, Gloo,
NCCL, PyTorch's stores and its watchdogs use. What counts is the exception that a chain begins with:
`ValueError`, and while that was handled a broken pipe, is a `ValueError`.
"""

from __future__ import annotations

import re

from holdfast.processes.failures import tracebacks

# Exceptions that always are, by their last name.
_OF_PEERS = frozenset(
    {
        "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError",
        "ConnectionResetError", "DistNetworkError", "DistStoreError", "EOFError",
        "IncompleteReadError", "StoreTimeoutError", "TimeoutError", "timeout",
    }
)  # fmt: skip
# Exceptions whose text may say so; that of any other does not matter, whatever it mentions.
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
# How many lines at the end of stderr are looked at where there is no traceback.
LINES_MAX = 12


def first_exception(traceback: str) -> str:
    """Return the line that names the exception with which a chain of tracebacks began."""
    return tracebacks.exception_line(tracebacks.first_of_chain(traceback))


def is_about_a_peer(exception: str) -> bool:
    """Say whether the line of an exception, `type: text`, tells of a peer."""
    name, _, text = exception.partition(":")
    last = name.strip().rpartition(".")[2]
    return last in _OF_PEERS or (last in _OF_ANYTHING and _speaks_of_a_peer(text))


def ends_about_a_peer(stderr: str) -> bool:
    """Say the same of the last words of a program that printed no traceback."""
    tail = "\n".join(tracebacks.readable_lines(stderr)[-LINES_MAX:])
    return _speaks_of_a_peer(tail)


def aborts_about_a_peer(stderr: str) -> bool:
    """Say the same of a program that aborted, as PyTorch's watchdogs do."""
    text = "\n".join(tracebacks.readable_lines(stderr))
    found = _CAUGHT_BY_NOBODY.search(text)
    return found is not None and _speaks_of_a_peer(text[found.start() :])


def _speaks_of_a_peer(text: str) -> bool:
    # Compiled when it is first needed, which in most jobs is never.
    return re.search(_WORDS, text, re.IGNORECASE | re.VERBOSE) is not None
