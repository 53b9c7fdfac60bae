"""Public data classes that do not import `dataclasses` until a caller needs it.

`@lazy_dataclass` gives a class the constructor, comparison and text of a `@dataclass`. The functions of
`dataclasses` (`fields`, `replace`, `asdict`) treat the class as a data class, and data classes may derive
from the class. Its description is built when it is first read. Importing `dataclasses` would take a
tenth of an agent's start (docs/internals/decisions/0029-start-up-time.md has the figures).

It supports what the public classes need: defaults, default factories, keyword-only fields, fields that
the constructor does not take or the text omits, class variables, `__post_init__` and `copy.replace`. To
add fields in a subclass, use `@dataclass` on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_how):  # noqa: D103 (for the type checker only)
        return lambda decorator: decorator


class _Missing:
    """The default of a field that has none."""


class _Field:
    """The options of a field, named as in `dataclasses.field`."""

    def __init__(self, **how: Any) -> None:
        self.how = how
        self.is_given = how.get("init", True)
        self.is_shown = how.get("repr", True)
        self.is_by_position = self.is_given and not how.get("kw_only", False)
        self.default = how.get("default", _Missing)

    def value(self) -> Any:
        """Return the default, made for one instance."""
        return self.how["default_factory"]() if "default_factory" in self.how else self.default

    @property
    def is_needed(self) -> bool:
        return self.is_given and self.default is _Missing and "default_factory" not in self.how


def factory_field(*, default_factory: Callable[[], Any]) -> Any:
    """Give a field a default that is created for each instance."""
    return _Field(default_factory=default_factory)


def keyword_field(*, default: Any, repr: bool = True, kw_only: bool = True) -> Any:  # noqa: A002 (as in `dataclasses`)
    """Declare a keyword-only field with a default."""
    return _Field(default=default, repr=repr, kw_only=kw_only)


def post_init_field(*, repr: bool = True, init: bool = False) -> Any:  # noqa: A002 (as in `dataclasses`)
    """Declare a field that `__post_init__` sets and the constructor does not take."""
    return _Field(init=init, repr=repr)


class _AsDataclass:
    """An attribute that `dataclasses` or `inspect` reads from a class; computed when it is read."""

    def __init__(self, name: str, home: type, fields: dict[str, _Field]) -> None:
        self._name = name
        self._home = home
        self._fields = fields

    def __get__(self, _instance: object, owner: type) -> Any:
        if self._name != "__signature__":
            return getattr(_real_dataclass(self._home, self._fields), self._name)
        if owner.__init__ is not self._home.__init__:  # type: ignore[misc]
            raise AttributeError(self._name)  # A subclass has its own constructor.
        import inspect

        return inspect.signature(_real_dataclass(self._home, self._fields))


def _real_dataclass(home: Any, fields: dict[str, _Field]) -> Any:
    """Return the real data class with the same fields; always the same one."""
    if "__dataclass_twin__" not in home.__dict__:
        import dataclasses

        namespace: dict[str, Any] = {
            "__annotations__": {name: home.__annotations__[name] for name in fields},
            "__qualname__": home.__qualname__,
        }
        for name, one in fields.items():
            if one.how:
                namespace[name] = dataclasses.field(**one.how)
        home.__dataclass_twin__ = dataclasses.dataclass(type(home.__name__, (), namespace))
    return home.__dataclass_twin__


@dataclass_transform(field_specifiers=(factory_field, keyword_field, post_init_field))
def lazy_dataclass(cls: type[T]) -> type[T]:
    """Turn a class of annotated fields into a data class; see the module."""
    fields: dict[str, _Field] = {}
    for name, kind in cls.__annotations__.items():
        if str(kind).startswith("ClassVar"):
            continue
        given = cls.__dict__.get(name, _Missing)
        if not isinstance(given, _Field):
            fields[name] = _Field() if given is _Missing else _Field(default=given)
            continue
        fields[name] = given
        if given.default is _Missing:
            delattr(cls, name)
        else:
            setattr(cls, name, given.default)
    cls.__lazy_fields__ = fields  # type: ignore[attr-defined]
    _add_methods(cls, fields)
    for name in ("__dataclass_fields__", "__dataclass_params__", "__signature__"):
        setattr(cls, name, _AsDataclass(name, cls, fields))
    cls.__match_args__ = tuple(n for n, one in fields.items() if one.is_by_position)  # type: ignore[attr-defined,misc]
    cls.__hash__ = None  # type: ignore[assignment]
    return cls


def _add_methods(cls: type, fields: dict[str, _Field]) -> None:
    by_position = [name for name, one in fields.items() if one.is_by_position]
    given = {name: one for name, one in fields.items() if one.is_given}
    needed = {name for name, one in fields.items() if one.is_needed}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it becomes one)
        values = dict(zip(by_position, args, strict=False)) | kwargs
        is_complete = needed <= values.keys() <= given.keys()
        if not is_complete or len(values) != len(args) + len(kwargs):
            _real_dataclass(cls, fields)(*args, **kwargs)  # It raises the proper error.
        for name, one in fields.items():
            if name in values:
                setattr(self, name, values[name])
            elif one.is_given:
                setattr(self, name, one.value())
        if hasattr(cls, "__post_init__"):
            self.__post_init__()

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = __init__  # type: ignore[misc]
    if "__eq__" not in cls.__dict__:
        cls.__eq__ = _eq  # type: ignore[assignment,method-assign]
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _repr  # type: ignore[assignment,method-assign]
    if "__replace__" not in cls.__dict__:
        cls.__replace__ = _replace  # type: ignore[attr-defined]


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__lazy_fields__}


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _values(self) == _values(other)


def _replace(self: Any, /, **changes: Any) -> Any:
    """Return a copy with some fields changed; `copy.replace` calls this from Python 3.13 on."""
    import dataclasses

    return dataclasses.replace(self, **changes)


def _repr(self: Any) -> str:
    shown = [name for name, one in self.__lazy_fields__.items() if one.is_shown]
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{type(self).__qualname__}({fields})"
