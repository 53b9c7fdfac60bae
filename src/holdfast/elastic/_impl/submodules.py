"""The submodules of a package as its attributes, imported at their first use.

TorchElastic's modules import each other, so a program that has imported one reaches the others as attributes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def bind_submodules(package: str) -> None:
    """Let a package's submodules be its attributes without an import.

    Type checkers do not see this, so they still report names that do not exist.
    """

    def imported(name: str) -> ModuleType:
        full = f"{package}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(full)
            except ModuleNotFoundError as problem:
                if problem.name != full:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    sys.modules[package].__dict__["__getattr__"] = imported
