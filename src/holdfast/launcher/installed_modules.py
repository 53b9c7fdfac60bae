"""Which modules are installed, and which are the person's own: found without importing any.

The one thing to know: a module is installed if the folder where Python meets it first holds the
standard library or is called `site-packages` (`dist-packages` on Debian). Everything else (beside
the script, in the working directory, below PYTHONPATH, an editable install) is being worked on:
it may change between two starts of the workers, and may ask at its import which worker it is in.
"""

from __future__ import annotations

import os
import sys

from holdfast.core.facts import Fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.launcher.top_level_imports import Import

INSTALLED_FOLDERS = ("site-packages", "dist-packages")
# Not worth an import ahead: part of the interpreter, or of ours. And mpi4py joins its job when it
# is imported, as one process, which a fork would make into several.
SKIPPED = frozenset({"__future__", "__main__", "holdfast", "mpi4py", *sys.builtin_module_names})


class Place(Fact):
    """A folder that modules are looked for in."""

    folder: str
    installed: bool


class Found(Fact):
    """A module: the file it is loaded from, if any, and where its submodules are."""

    origin: str | None
    installed: bool
    below: tuple[Place, ...]


def places_of(folders: Iterable[str]) -> list[Place]:
    """Return folders of a search path as places; an empty one is the working directory."""
    standard = os.path.dirname(os.path.abspath(os.__file__))
    places = []
    for folder in folders:
        try:
            path = os.path.abspath(folder)
        except OSError:
            continue  # The working directory was removed.
        standard_library = path in (standard, os.path.join(standard, "lib-dynload"))
        installed = standard_library or os.path.basename(path) in INSTALLED_FOLDERS
        places.append(Place(path, installed))
    return places


def locate(name: str, places: Sequence[Place]) -> Found | None:
    """Find a module by its full name, one step for each part, as Python would."""
    found: Found | None = None
    parts = name.split(".")
    for at in range(len(parts)):
        found = _step(".".join(parts[: at + 1]), places)
        if found is None:
            return None
        places = found.below
    return found


def _step(full_name: str, places: Sequence[Place]) -> Found | None:
    """Find a module in the first place that has it.

    Folders without an `__init__.py` are one package together, unless a later place has a module.
    """
    # Not PathFinder: it asks the parent of such a package for its path, which is not imported.
    from pkgutil import get_importer

    portions: list[Place] = []
    for place in places:
        finder = get_importer(place.folder)
        spec = finder.find_spec(full_name) if finder is not None else None
        if spec is None:
            continue
        folders = spec.submodule_search_locations or ()
        below = tuple(Place(folder, place.installed) for folder in folders)
        if spec.loader is not None:
            return Found(spec.origin, place.installed, below)
        portions.extend(below)
    if not portions:
        return None
    return Found(None, all(portion.installed for portion in portions), tuple(portions))


def installed_among(
    imports: Iterable[Import], places: Sequence[Place], *, missing_counts: bool = False
) -> list[str]:
    """Return the modules that imports bring in and that are installed, each once, in order.

    `from a import b` brings in `a`, and `a.b` if that is a module. With `missing_counts` a module
    counts as installed too if its package is in none of the places.
    """
    names: dict[str, None] = {}
    for module, members in imports:
        top = module.partition(".")[0]
        if top in SKIPPED:
            continue
        found = locate(module, places)
        if found is None:
            if missing_counts and locate(top, places) is None:
                names[module] = None
            continue
        if not found.installed:
            continue
        names[module] = None
        for member in members:
            below = locate(member, found.below)
            if below is not None and below.installed:
                names[f"{module}.{member}"] = None
    return list(names)
