"""A problem with etcd as an exception, for code that blocks.

`client` never raises: there a `Problem` is an answer like others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import Trouble
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.core.etcd_calls import Problem


class EtcdError(HoldfastError):
    """etcd did not do what was asked; `kind` says what can be done about it.

    `tried` is what each endpoint had to say; with several of them the message tells all of it.
    """

    exit_code = 78

    def __init__(
        self, problem: Problem, where: str, tried: Mapping[str, str] | None = None
    ) -> None:
        self.kind: Trouble = problem.kind
        self.why = problem.why
        super().__init__(f"etcd at {where}: {told(problem, tried or {})}")


def told(problem: Problem, tried: Mapping[str, str]) -> str:
    """Return why, with what each endpoint said where none answered and not all said the same."""
    if problem.kind is not Trouble.UNREACHABLE or len(set(tried.values())) < 2:
        return problem.why
    return "; ".join(f"{endpoint}: {why}" for endpoint, why in tried.items())
