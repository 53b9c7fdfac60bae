from __future__ import annotations

import os
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from holdfast.launcher.installed_modules import (
    Found,
    Place,
    installed_among,
    locate,
    places_of,
)

if TYPE_CHECKING:
    from pathlib import Path

ACTS = "raise AssertionError('this was imported')\n"


def write(folder: Path, *names: str) -> Path:
    """Make files that say so if they are imported."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ACTS)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages."""
    return write(
        tmp_path / "site-packages",
        "plain.py",
        "pack/__init__.py",
        "pack/part.py",
        "pack/deep/__init__.py",
        "pack/deep/end.py",
        "space/inner/__init__.py",
    )


def among(*imports: tuple[str, tuple[str, ...]] | str, folders: list[Path]) -> list[str]:
    written = [(one, ()) if isinstance(one, str) else one for one in imports]
    return installed_among(written, places_of(map(str, folders)))


# Places.


def test_folders_of_packages_and_of_the_standard_library_count_as_installed() -> None:
    standard = os.path.dirname(os.__file__)
    given = ["/x/site-packages", "/y/dist-packages/", standard, f"{standard}/lib-dynload", "/x", ""]
    places = places_of(given)
    assert [place.installed for place in places] == [True] * 4 + [False] * 2
    assert places[1] == Place("/y/dist-packages", installed=True)
    assert places[-1].folder == os.getcwd()


def test_the_path_of_this_interpreter_has_what_it_should() -> None:
    installed = {place.folder for place in places_of(sys.path) if place.installed}
    assert os.path.dirname(os.__file__) in installed
    assert os.path.dirname(os.path.dirname(pytest.__file__)) in installed


def test_a_working_directory_that_was_removed_is_no_place(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    own.rmdir()
    assert places_of(["", "/x"]) == [Place("/x", installed=False)]


# Finding.


def test_modules_are_found_step_by_step_and_none_is_imported(site: Path) -> None:
    places = places_of([str(site)])
    before = set(sys.modules)
    deep = locate("pack.deep", places)
    assert deep is not None
    assert deep.origin == str(site / "pack/deep/__init__.py")
    assert deep.below == (Place(str(site / "pack/deep"), installed=True),)
    end = locate("pack.deep.end", places)
    assert end is not None
    assert end.below == ()
    for missing in ("gone", "pack.gone", "pack.gone.end", "plain.part", "", "pack..deep"):
        assert locate(missing, places) is None
    assert {
        name for name in sys.modules if name not in before and name.startswith("pack.")
    } == set()


def test_the_first_place_decides(own: Path, site: Path) -> None:
    write(own, "plain.py")
    first = locate("plain", places_of([str(own), str(site)]))
    assert first == Found(str(own / "plain.py"), installed=False, below=())
    last = locate("plain", places_of([str(site), str(own)]))
    assert last == Found(str(site / "plain.py"), installed=True, below=())


def test_a_folder_without_init_does_not_hide_an_installed_package(own: Path, site: Path) -> None:
    (own / "pack").mkdir()
    found = locate("pack.part", places_of([str(own), str(site)]))
    assert found is not None
    assert found.installed


def test_packages_spread_over_several_places(own: Path, site: Path) -> None:
    write(own, "space/mine.py")
    places = places_of([str(own), str(site)])
    whole = locate("space", places)
    assert whole is not None
    assert not whole.installed
    inner, mine = locate("space.inner", places), locate("space.mine", places)
    assert inner is not None
    assert mine is not None
    assert (inner.installed, mine.installed) == (True, False)
    alone = locate("space", places_of([str(site)]))
    assert alone is not None
    assert alone.installed


def test_modules_within_an_archive_are_found(tmp_path: Path) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("pack/__init__.py", ACTS)
        file.writestr("pack/part.py", ACTS)
    found = locate("pack.part", places_of([str(archive)]))
    assert found == Found(f"{archive}/pack/part.py", installed=False, below=())


# Choosing.


def test_installed_modules_are_chosen_once_and_in_order(own: Path, site: Path) -> None:
    write(own, "model.py", "plain.py")
    chosen = among("pack.deep", "model", "plain", "gone", "pack", "pack.deep", folders=[own, site])
    assert chosen == ["pack.deep", "pack"]


def test_names_that_are_modules_are_chosen_with_their_package(site: Path) -> None:
    names = ("part", "SomeClass", "deep", "*")
    assert among(("pack", names), folders=[site]) == ["pack", "pack.part", "pack.deep"]
    assert among(("space", ("inner",)), folders=[site]) == ["space", "space.inner"]


def test_what_the_interpreter_has_anyway_is_left_out(site: Path) -> None:
    write(site, "holdfast/__init__.py", "sys.py", "mpi4py/__init__.py", "mpi4py/MPI.py")
    skipped = ("__future__", "__main__", "sys", "time", "holdfast", "holdfast.errors", "mpi4py")
    assert among(*skipped, ("mpi4py", ("MPI",)), "plain", folders=[site]) == ["plain"]


def test_modules_of_the_standard_library_are_installed() -> None:
    chosen = installed_among(
        [("json", ("decoder",)), ("math", ()), ("os", ())], places_of(sys.path)
    )
    assert chosen[:2] == ["json", "json.decoder"]
    assert "os" in chosen


def test_what_is_in_no_place_counts_if_the_places_are_not_all(own: Path) -> None:
    write(own, "model.py", "src/part.py")
    imports = [
        ("torch.nn", ("Linear",)),
        ("model", ()),
        ("src.part", ()),
        ("src", ()),
        ("src.gone", ()),
        ("sys", ()),
        ("numpy", ()),
    ]
    places = places_of([str(own)])
    assert installed_among(imports, places, missing_counts=True) == ["torch.nn", "numpy"]
