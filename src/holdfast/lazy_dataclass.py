"""Public data classes that cost nothing to import until someone treats them as such.

`@lazy_dataclass` makes what `@dataclass` makes of a class: constructor, comparison, text. For
everything in `dataclasses` (`fields`, `replace`, `asdict`, deriving from it) the class *is* a data
class, but that module is imported only when it asks. Importing it would take a tenth of an agent's
start (docs/internals/decisions/0006-light-values.md has the figures).

Supported is what the public classes need: defaults, default factories, keyword-only fields, class
variables, `__post_init__` and `copy.replace`. To add fields in a subclass, use `@dataclass` on it.
"""

from __future__ import annotations

TYPE_CHECKING = False


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_how):  # noqa: D103 (for the type checker only)
        return lambda decorator: decorator


class _Factory:
    """A default that is created for each instance."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def factory_field(*, default_factory: Callable[[], Any]) -> Any:
    """Give a field a default that is created for each instance."""
    return _Factory(default_factory)


class _KeywordOnly:
    """A default of a field that is given by keyword only."""

    def __init__(self, default: Any) -> None:
        self.default = default


def keyword_field(*, default: Any, kw_only: bool = True) -> Any:
    """Give a field a default, and have it given by keyword only."""
    assert kw_only  # It is there for the type checker.
    return _KeywordOnly(default)


class _AsDataclass:
    """Answers what `dataclasses` and `inspect` ask of a class, when they ask."""

    def __init__(self, name: str, home: type, specs: dict[str, Any]) -> None:
        self._name = name
        self._home = home
        self._specs = specs

    def __get__(self, _instance: object, owner: type) -> Any:
        if self._name != "__signature__":
            return getattr(_twin(self._home, self._specs), self._name)
        if owner.__init__ is not self._home.__init__:  # type: ignore[misc]
            raise AttributeError(self._name)  # A class below it has a constructor of its own.
        import inspect

        return inspect.signature(_twin(self._home, self._specs))


def _twin(home: Any, specs: dict[str, Any]) -> Any:
    """Return the data class that is made of the same fields, the same one each time."""
    if "__dataclass_twin__" not in home.__dict__:
        import dataclasses

        kinds = {name: home.__annotations__[name] for name in home.__lazy_fields__}
        namespace: dict[str, Any] = {
            "__annotations__": kinds,
            "__qualname__": home.__qualname__,
        }
        for field, default in specs.items():
            match default:
                case _Factory(factory=factory):
                    namespace[field] = dataclasses.field(default_factory=factory)
                case _KeywordOnly(default=value):
                    namespace[field] = dataclasses.field(default=value, kw_only=True)
                case _:
                    namespace[field] = default
        home.__dataclass_twin__ = dataclasses.dataclass(type(home.__name__, (), namespace))
    return home.__dataclass_twin__


@dataclass_transform(field_specifiers=(factory_field, keyword_field))
def lazy_dataclass(cls: type[T]) -> type[T]:
    """Turn a class of annotated fields into a data class; see the module."""
    names = [
        name for name, kind in cls.__annotations__.items() if not str(kind).startswith("ClassVar")
    ]
    specs = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    cls.__lazy_fields__ = tuple(names)  # type: ignore[attr-defined]
    _add_methods(cls, names, specs)
    for name, default in specs.items():
        if isinstance(default, _KeywordOnly):
            setattr(cls, name, default.default)
        elif isinstance(default, _Factory):
            delattr(cls, name)
    for name in ("__dataclass_fields__", "__dataclass_params__", "__signature__"):
        setattr(cls, name, _AsDataclass(name, cls, specs))
    cls.__match_args__ = tuple(n for n in names if not isinstance(specs.get(n), _KeywordOnly))  # type: ignore[attr-defined,misc]
    cls.__hash__ = None  # type: ignore[assignment]
    return cls


def _add_methods(cls: type, names: list[str], specs: dict[str, Any]) -> None:
    by_position = [name for name in names if not isinstance(specs.get(name), _KeywordOnly)]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it becomes one)
        values = dict(zip(by_position, args, strict=False)) | kwargs
        missing = [name for name in names if name not in values and name not in specs]
        if missing or len(values) != len(args) + len(kwargs) or not values.keys() <= set(names):
            _twin(cls, specs)(*args, **kwargs)  # It raises the proper error.
        for name in names:
            setattr(self, name, values[name] if name in values else _made(specs[name]))
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


def _made(default: Any) -> Any:
    """Return the value of a default, made for one instance."""
    if isinstance(default, _Factory):
        return default.factory()
    return default.default if isinstance(default, _KeywordOnly) else default


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__lazy_fields__}


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _values(self) == _values(other)


def _replace(self: Any, /, **changes: Any) -> Any:
    """Return another with some fields changed; `copy.replace` asks for this from Python 3.13 on."""
    import dataclasses

    return dataclasses.replace(self, **changes)


def _repr(self: Any) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
    return f"{type(self).__qualname__}({fields})"
