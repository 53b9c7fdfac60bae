"""`Value`: small immutable records, for events, effects and the data of decisions.

`class WorkerExited(Value)` with annotated fields behaves like a frozen dataclass: constructor by position
or name, equality, hash, repr and pattern matching. The agent defines about sixty of them before it
starts a worker, and `dataclasses` would generate and compile code for each
(docs/internals/decisions/0029-start-up-time.md has the measurements).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, ClassVar, dataclass_transform
else:

    def dataclass_transform(**_how):  # noqa: D103 (for the type checker only)
        return lambda cls: cls


@dataclass_transform(frozen_default=True)
class Value:
    """The base of all values. A subclass lists its fields, those with defaults last."""

    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[misc]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = self.__match_args__
        values = self.__dict__
        if len(args) == len(names) and not kwargs:
            values.update(zip(names, args, strict=True))
            return
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} has {len(names)} fields, not {len(args)}")
        values.update(zip(names, args, strict=False))
        for name in names[len(args) :]:
            if name in kwargs:
                values[name] = kwargs.pop(name)
            elif name in type(self).__dict__:
                values[name] = type(self).__dict__[name]
            else:
                raise TypeError(f"{type(self).__name__} needs {name!r}")
        for name in kwargs:
            what = f"was given {name!r} twice" if name in names else f"has no field {name!r}"
            raise TypeError(f"{type(self).__name__} {what}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed: {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed: {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"
