"""PyTorch's TCPStore protocol: its words and its limits, for the server and the client.

A request is one byte, the operation, and its body; integers are little-endian, a text is its length
as u64 and its bytes. The one thing to know: some operations have no answer at all (SET, APPEND,
MULTI_SET, QUEUE_PUSH, VALIDATE), so a client that must know has to ask something after them.
"""

from __future__ import annotations

VALIDATE = 0
SET = 1
COMPARE_SET = 2
GET = 3
ADD = 4
CHECK = 5
WAIT = 6
GETNUMKEYS = 7
DELETE_KEY = 8
APPEND = 9
MULTI_GET = 10
MULTI_SET = 11
CANCEL_WAIT = 12
PING = 13
QUEUE_PUSH = 14
QUEUE_POP = 15
QUEUE_LEN = 16
LIST_KEYS = 17
BARRIER = 18

OPERATIONS = 19

MAGIC = 0x3C85F7CE
"""What VALIDATE carries: a client of this protocol, and of this version of it."""

READY, NOT_READY = 0, 1  # What CHECK is answered.
STOP_WAITING, WAIT_CANCELED = 0, 1  # What WAIT and BARRIER are answered, and CANCEL_WAIT.

KEY_BYTES_MAX = 8192
VALUE_BYTES_MAX = 8 * 1024 * 1024
KEYS_MAX = 131_072
"""How many keys one CHECK, WAIT, MULTI_GET or MULTI_SET may name."""

INIT_KEY = "init/"
"""The counter of clients, and the only key without a `/` before it on the wire."""
