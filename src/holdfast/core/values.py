"""Small immutable values: events, effects, and what a decision is made of.

`class Exited(Fact)` with annotated fields is what a frozen dataclass would be: made by position or
by name, compared, hashed, shown and matched by its fields. `class State(Enum)` is what an enum of
the standard library would be. They are written here because agents start often and must start fast:
`dataclasses`, `msgspec` and `enum` each cost more to import than all of `holdfast.core`
(docs/internals/decisions/0006-light-values.md and 0029-only-what-every-job-needs.md have the figures).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enum import Enum as Enum  # noqa: PLC0414 (others import it from here)
    from typing import Any, ClassVar, dataclass_transform
else:

    def dataclass_transform(**_how):  # noqa: D103 (for the type checker only)
        return lambda cls: cls

    class Members(type):
        """The type of a class of members: `State("idle")` is a member, and it lists them all."""

        def __call__(cls, value):
            for member in cls:
                if member.value == value:
                    return member
            raise ValueError(f"{value!r} is not a valid {cls.__qualname__}")

        def __iter__(cls):
            return iter(cls.__members__.values())

        def __len__(cls):
            return len(cls.__members__)

    class Enum(metaclass=Members):
        """Base of a class whose members are all its values; they are compared by identity."""

        def __init_subclass__(cls):
            cls.__members__ = {}
            for name, value in [*vars(cls).items()]:
                if not (name.startswith("_") or hasattr(value, "__get__")):  # As methods have.
                    cls.__members__[name] = member = object.__new__(cls)
                    member.name, member.value = name, value
                    setattr(cls, name, member)

        def __reduce__(self):
            return type(self), (self.value,)  # A copy is the member itself.

        def __repr__(self):
            return f"<{type(self).__qualname__}.{self.name}: {self.value!r}>"

        def __str__(self):
            return f"{type(self).__qualname__}.{self.name}"


@dataclass_transform(frozen_default=True)
class Value:
    """Base of the values; a subclass only lists its fields, those with defaults last."""

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
