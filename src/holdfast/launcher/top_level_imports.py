"""What a Python source imports at its top level, found by reading it: nothing of it is run.

The one thing to know: an import counts if a worker runs it for sure, or may well. That is one
among the statements of the module, or below `try`, `else`, `finally`, `with` or `if`. Not what a
type checker alone reads (`if TYPE_CHECKING`), nor what is a way out only (`except`), nor what
waits inside a function or a class. Below `if __name__ == "__main__"` it depends on whether the
source is the program of a worker, as a script is, or the module of a function.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence

    Import = tuple[str, tuple[str, ...]]
    """A module, and the names that `from` takes out of it."""


def top_level_imports(source: bytes | str, *, as_main: bool) -> list[Import]:
    """Return the absolute imports of a source in their order; `ValueError` if it is not Python.

    `as_main` says that the source runs as `__main__`.
    """
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The worker that runs it has the same to tell.
            tree = ast.parse(source)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise ValueError(f"{error.msg}{where}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None
    return list(_imports_of(tree.body, as_main=as_main))


def _imports_of(statements: Sequence[ast.stmt], *, as_main: bool) -> Iterator[Import]:
    import ast

    for statement in statements:
        run: list[ast.stmt] = []
        match statement:
            case ast.Import(names=names):
                yield from ((alias.name, ()) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module, tuple(alias.name for alias in names)
            case ast.If(test=test, body=body, orelse=orelse):
                known = _truth(test, as_main=as_main)
                run = [*([] if known is False else body), *([] if known is True else orelse)]
            case ast.Try() | ast.TryStar():
                run = [*statement.body, *statement.orelse, *statement.finalbody]
            case ast.With(body=body):
                run = body
        yield from _imports_of(run, as_main=as_main)


def _truth(test: ast.expr, *, as_main: bool) -> bool | None:
    """Return what a condition is known to be in a worker, `None` if only the worker knows."""
    import ast

    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return False
        case ast.Constant(value=value):
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            known = _truth(operand, as_main=as_main)
            return None if known is None else not known
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            for one, other in ((left, right), (right, left)):
                match one, other:
                    case ast.Name(id="__name__"), ast.Constant(value="__main__"):
                        return as_main is isinstance(op, ast.Eq)
    return None
