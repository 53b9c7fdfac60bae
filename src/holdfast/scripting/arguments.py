"""What a script is started with: variables it cannot do without, and placeholders in arguments."""

from __future__ import annotations

import os
from typing import Any

from holdfast.agent.environment import substitute_local_rank
from holdfast.errors import UsageError


def get_env_variable_or_raise(env_name: str) -> str:
    """Return a variable of the environment; raise `UsageError`, a `ValueError`, if it is not set.

    An empty variable is set.
    """
    value = os.environ.get(env_name)
    if value is None:
        raise UsageError(f"{env_name}: the variable is not set in the environment")
    return value


class macros:  # noqa: N801 (TorchElastic's name)
    """Placeholders in a worker's arguments, which the agent replaces for each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments of one worker, as the agent would; what is no text stays."""
        return [substitute_local_rank(arg, local_rank) for arg in args]
