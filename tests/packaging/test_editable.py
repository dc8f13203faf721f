"""An editable installation is a path that type checkers and editors read, and no import hook."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from tests.packaging.building import Environment, call_backend

APPLICATION = """\
import aionn
print(aionn.__version__, aionn.__file__)
"""


@pytest.fixture(scope="session")
def clone(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree in a folder that is named like the package."""
    target = tmp_path_factory.mktemp("beside") / "aionn"
    shutil.copytree(tree, target)
    return target


@pytest.fixture(scope="session")
def editable(
    clone: Path, compiler_that_writes_nothing: str, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    wheel = call_backend(
        clone, "build_editable", tmp_path_factory.mktemp("editable"), CC=compiler_that_writes_nothing
    )
    environment = Environment(tmp_path_factory.mktemp("with_editable") / "venv")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".py")], "no import hook"
        archive.extractall(environment.packages)  # All that an installer does with files without scripts.
    return environment


def test_editable_installation_is_one_path(editable: Environment, clone: Path) -> None:
    (path,) = editable.packages.glob("__editable__*.pth")
    assert path.read_text().split("\n") == [str(clone), ""]


def test_script_beside_the_clone_imports_the_package(editable: Environment, clone: Path) -> None:
    script = clone.parent / "application.py"
    script.write_text(APPLICATION)
    told = editable.run(editable.python, script, cwd=clone.parent)
    assert told.split()[1] == str(clone / "aionn" / "__init__.py")
