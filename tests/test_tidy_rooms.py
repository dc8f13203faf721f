"""The project's rules about folders and modules: how many files a folder holds, and that modules import in no circle.

Each rule has a test that feeds it bad snippets; a needless excuse fails as well. Source: docs/architecture.md."""

import pathlib
import subprocess
from collections import Counter
from shutil import which

import pytest

from tests.test_tidy import PACKAGES, ROOT, excused, imports_of, module_name, parse, read, report

FILES_PER_FOLDER_MAX = 16
FULL_FOLDERS: dict[str, str] = {}
"""``folder: reason`` for folders that hold more files."""

ROOT_FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.py",
}

KNOTTED: dict[str, str] = {}
"""``module: reason`` for modules that import each other in a circle; imports for types alone count."""


def knotted_modules(sources: dict[str, str]) -> dict[str, int]:
    """Modules from which a chain of imports leads back to them, and how many are in their circle.

    The package around an imported module does not count: it is imported first, whoever imports.
    """
    modules = {module_name(path) for path in sources}
    graph = {
        module_name(path): {target for _, target in imports_of(path, parse(text), modules)} & modules
        for path, text in sources.items()
    }

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        unseen = [start]
        while unseen:
            new = graph[unseen.pop()] - found
            found |= new
            unseen += new
        return found

    reachable = {module: reached(module) for module in graph}
    circles = {m: {o for o in found if m in reachable[o]} for m, found in reachable.items() if m in found}
    return {module: len(circle) for module, circle in circles.items() if len(circle) > 1}


def full_folders(paths: list[str]) -> dict[str, int]:
    counts = Counter(str(pathlib.PurePosixPath(path).parent) for path in paths)
    return {folder: count for folder, count in counts.items() if count > FILES_PER_FOLDER_MAX}


def missing_packages(paths: list[str]) -> list[str]:
    """Folders of modules without ``__init__.py``: a wheel would leave them out."""
    folders = {str(pathlib.PurePosixPath(path).parent) for path in paths}
    return [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in paths]


# --- The rules, applied -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package_sources() -> dict[str, str]:
    return read(PACKAGES, (".py",))


def test_modules_import_in_no_circle(package_sources):
    found, needless = excused(knotted_modules(package_sources), KNOTTED)
    report([f"{module} is in a circle of {count} modules" for module, count in found.items()])
    report([f"{module} is excused without need" for module in needless])


def test_folders_hold_few_files():
    sources = read((*PACKAGES, "tests", "benchmarks", "examples", "build_backend"), (".py",)) | read(
        ("docs",), (".md",)
    )
    found, needless = excused(full_folders(list(sources)), FULL_FOLDERS)
    report([f"{folder}: {count} files, at most {FILES_PER_FOLDER_MAX}" for folder, count in found.items()])
    report([f"{folder} is excused without need" for folder in needless])


def test_root_holds_the_files_of_the_project_alone():
    """A file that a test or an example leaves in its working directory is easily committed."""
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True) if which("git") else None
    )
    if listed is None or listed.returncode:
        pytest.skip("not a git checkout")
    names = {name for name in listed.stdout.decode().split("\0") if name and "/" not in name}
    assert {name for name in names if (ROOT / name).exists()} <= ROOT_FILES


def test_every_folder_of_modules_is_a_package(package_sources):
    report([f"{folder} has no __init__.py" for folder in missing_packages(list(package_sources))])


# --- The rules, tested --------------------------------------------------------------------------------------------------------


def test_knot_rule_catches_modules_in_a_circle_and_no_others():
    sources = {
        "aionn/hal/a.py": "import aionn.hal.b\nimport aionn.hal.d",
        "aionn/hal/b.py": "def f():\n    from aionn.hal import c",
        "aionn/hal/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aionn.hal.a import A",
        "aionn/hal/d.py": "import fences",
        "aionn/hal/e.py": "import aionn.hal.a",
    }
    assert knotted_modules(sources) == {"aionn.hal.a": 3, "aionn.hal.b": 3, "aionn.hal.c": 3}
    sources["aionn/hal/c.py"] = "import aionn.hal.d"
    assert knotted_modules(sources) == {}


def test_knot_rule_does_not_count_the_package_around_a_module():
    assert (
        knotted_modules(
            {"aionn/hal/__init__.py": "import aionn.hal.a", "aionn/hal/a.py": "import aionn.hal.b"}
        )
        == {}
    )


def test_folder_rules_catch():
    many = [f"aionn/hal/{letter}.py" for letter in "abcdefghijklmnopq"]
    assert full_folders(many) == {"aionn/hal": 17}
    assert full_folders([*many[:16], "aionn/ops/a.py", "aionn/hal/inner/a.py"]) == {}
    assert missing_packages(["fmq/__init__.py", "fmq/a.py", "fmq/inner/a.py"]) == ["fmq/inner"]
