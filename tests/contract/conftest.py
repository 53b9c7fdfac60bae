"""What the suites of this folder share."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tcp_store() -> Any:
    """One server of torch's for all tests: its sockets are closed only when it is forgotten.

    None without torch; then no test that needs it is run.
    """
    if find_spec("torch") is None:
        return None
    from torch.distributed import TCPStore

    return TCPStore("localhost", 0, is_master=True)
