"""Public data classes that cost nothing to import until someone treats them as such.

`@record_class` makes what `@dataclass` makes of a class: constructor, comparison, text. For
everything in `dataclasses` (`fields`, `replace`, `asdict`, deriving from it) the class *is* a data
class, but that module is imported only when it asks. It and what it drags in would take a tenth of
an agent's start (docs/internals/decisions/0006-light-values.md has the figures).

Supported is what the public classes need: defaults, `fresh` for defaults made anew each time,
`keyword` for fields that are given by keyword only, class variables, `__post_init__`. To add
fields in a subclass, use `@dataclass` on it.
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


class Fresh:
    """A default that is made anew for each instance."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def fresh(*, default_factory: Callable[[], Any]) -> Any:
    """Give a field a default that is made anew for each instance."""
    return Fresh(default_factory)


class _Made:
    """Stands in a signature for a fresh default, and looks there as it does for a data class."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE = _Made()


class Keyword:
    """A default of a field that is given by keyword only."""

    def __init__(self, default: Any) -> None:
        self.default = default


def keyword(*, default: Any, kw_only: bool = True) -> Any:
    """Give a field a default, and have it given by keyword only."""
    assert kw_only  # It is there for the type checker.
    return Keyword(default)


class _AsDataclass:
    """Answers what `dataclasses` asks of a class or of one below it, when it asks."""

    def __init__(self, name: str, home: type, specs: dict[str, Any]) -> None:
        self._name = name
        self._home = home
        self._specs = specs

    def __get__(self, _instance: object, _owner: type) -> Any:
        import dataclasses

        home: Any = self._home
        kinds = {name: home.__annotations__[name] for name in home.__record_fields__}
        namespace: dict[str, Any] = {"__annotations__": kinds}
        for field, default in self._specs.items():
            match default:
                case Fresh(factory=factory):
                    namespace[field] = dataclasses.field(default_factory=factory)
                case Keyword(default=value):
                    namespace[field] = dataclasses.field(default=value, kw_only=True)
                case _:
                    namespace[field] = default
        twin: type = dataclasses.dataclass(type(home.__name__, (), namespace))
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(home, name, getattr(twin, name))
        return getattr(home, self._name)


@dataclass_transform(field_specifiers=(fresh, keyword))
def record_class(cls: type[T]) -> type[T]:
    """Turn a class of annotated fields into a data class, as the module tells."""
    names = [
        name for name, kind in cls.__annotations__.items() if not str(kind).startswith("ClassVar")
    ]
    specs = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    cls.__record_fields__ = tuple(names)  # type: ignore[attr-defined]
    _add_methods(cls, names, specs)
    for name, default in specs.items():
        if isinstance(default, Keyword):
            setattr(cls, name, default.default)
        elif isinstance(default, Fresh):
            delattr(cls, name)
    for name in ("__dataclass_fields__", "__dataclass_params__"):
        setattr(cls, name, _AsDataclass(name, cls, specs))
    cls.__match_args__ = tuple(n for n in names if not isinstance(specs.get(n), Keyword))  # type: ignore[attr-defined,misc]
    cls.__hash__ = None  # type: ignore[assignment]
    return cls


def _add_methods(cls: type, names: list[str], specs: dict[str, Any]) -> None:
    """Write the constructor as source text, so that its signature is the real one."""
    plain, by_keyword, body = ["self"], [], []
    scope: dict[str, Any] = {"_default": specs, "_made": _MADE}
    for name in names:
        default = specs.get(name)
        annotated = f"{name}: {cls.__annotations__[name]!r}"
        value = name
        if isinstance(default, Fresh):
            plain.append(f"{annotated} = _made")
            value = f"_default[{name!r}].factory() if {name} is _made else {name}"
        elif isinstance(default, Keyword):
            by_keyword.append(f"{annotated} = _default[{name!r}].default")
        elif name in specs:
            plain.append(f"{annotated} = _default[{name!r}]")
        else:
            plain.append(annotated)
        body.append(f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    if by_keyword:
        plain += ["*", *by_keyword]
    source = f"def __init__({', '.join(plain)}) -> None:\n " + "\n ".join(body or ["pass"])
    # Not with this file's way of annotations: those of the class are texts already.
    code = compile(source, "<record_class>", "exec", dont_inherit=True)
    exec(code, scope)  # noqa: S102 (names and defaults of our own classes)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = scope["__init__"]  # type: ignore[misc]
    if "__eq__" not in cls.__dict__:
        cls.__eq__ = _eq  # type: ignore[assignment,method-assign]
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _repr  # type: ignore[assignment,method-assign]


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__record_fields__}


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _values(self) == _values(other)


def _repr(self: Any) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
    return f"{type(self).__qualname__}({fields})"
