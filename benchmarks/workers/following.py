"""Measures how fast a worker's log arrives over the agent's own socket.

    following.py SOCKET RUN_ID BYTES

Prints one line of JSON after BYTES bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from holdfast.control.discovery import LocalJob, open_job
from holdfast.wire.messages import AgentIdentity, LogsQuery


async def follow(path: str, run_id: str, size: int) -> float:
    """Return the seconds from the first byte to the last."""
    begun, received = 0.0, 0
    async with await open_job(LocalJob(path=path, here=AgentIdentity(run_id=run_id))) as client:
        async for lines in client.logs("", LogsQuery(follow=True)):
            begun = begun or time.monotonic()
            received += len(lines.text)
            if received >= size:
                return time.monotonic() - begun
    return 0.0


def main() -> None:
    path, run_id, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print(json.dumps({"took_s": asyncio.run(follow(path, run_id, size))}), flush=True)


if __name__ == "__main__":
    main()
