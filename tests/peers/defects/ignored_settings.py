"""c10d silently ignores settings that it does not know, such as `timeout`."""

from __future__ import annotations

from .stage import Evidence, free_port, handler, present


def show() -> Evidence:
    made = handler(free_port(), "1:2", timeout=2, joint_timeout=3)
    join_s = made.settings.timeout.join.total_seconds()
    return Evidence(
        join_s == 600,
        f"with timeout=2 and the typo joint_timeout=3 the handler waits {join_s:g} s for nodes",
    )


if __name__ == "__main__":
    present(show)
