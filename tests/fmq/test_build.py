"""The build backend decides for the machine's compiler where there is one, for zig where there is none."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here; the build brings its own")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("LDSHARED", raising=False)
    spec = importlib.util.spec_from_file_location("aionn_build", ROOT / "build_backend/aionn_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler(folder: Path, name: str) -> None:
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.mark.parametrize("name", ["cc", "gcc", "clang"])
def test_a_compiler_on_the_path_is_used(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    compiler(tmp_path, name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend.has_compiler()
    with backend._compiler():
        assert "CC" not in os.environ


def test_the_chosen_compiler_decides(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, "gcc")
    compiler(tmp_path, "mine")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mine -m64")
    assert backend.has_compiler()
    monkeypatch.setenv("CC", "not-there")
    assert not backend.has_compiler()


def test_without_a_compiler_zig_is_asked_for_and_set(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert any(r.startswith("ziglang") for r in backend._with_zig([]))
    with backend._compiler():
        command = shlex.split(os.environ["CC"])
        assert command[:4] == [sys.executable, "-m", "ziglang", "cc"]
        assert "-fno-sanitize=undefined" in command
        assert os.environ["LDSHARED"].startswith(os.environ["CC"])
        assert Path(os.environ["ZIG_GLOBAL_CACHE_DIR"]).is_dir()
    assert "CC" not in os.environ and "ZIG_GLOBAL_CACHE_DIR" not in os.environ


def test_the_target_names_an_old_c_library(backend: ModuleType) -> None:
    target = backend.zig_target()
    assert target.endswith(("-linux-gnu.2.28", "-linux-musl"))


def test_with_a_compiler_nothing_more_is_asked_for(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, "cc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend._with_zig(["x"]) == ["x"]


def test_the_native_module_keeps_to_the_limited_api() -> None:
    import fmq._native

    assert fmq._native.__file__ is not None
    assert Path(fmq._native.__file__).name == "_native.abi3.so"


NEWER = [
    name
    for name in ("python3.12", "python3.13", "python3.14")
    if int(name.rpartition(".")[2]) > sys.version_info[1]
]
LOADED = """
import importlib.machinery, importlib.util, sys
import fmq.errors
loader = importlib.machinery.ExtensionFileLoader("fmq._native", sys.argv[1])
spec = importlib.util.spec_from_loader("fmq._native", loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
watch = module.Watch(None, -1, True)
before = sys.getrefcount(None)
for _ in range(2000):
    watch.result()
print(before - sys.getrefcount(None))
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NEWER)
def test_a_module_built_by_a_newer_python_counts_none_under_this_one(tmp_path: Path, name: str) -> None:
    gcc = shutil.which("gcc")
    asked = [name, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
    found = subprocess.run(asked, capture_output=True, text=True) if shutil.which(name) else None
    if (
        gcc is None
        or found is None
        or found.returncode
        or not Path(found.stdout.strip(), "Python.h").exists()
    ):
        pytest.skip("needs gcc and a newer Python with its headers")
    built = tmp_path / "_native.abi3.so"
    include = ["-I", found.stdout.strip(), "-DPy_LIMITED_API=0x030B0000"]
    source = [*map(str, sorted((ROOT / "fmq").glob("*.c"))), "-o", str(built)]
    subprocess.run([gcc, "-std=c11", "-O1", "-shared", "-fPIC", *include, *source], check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(built)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert int(done.stdout) < 100


def test_source_tree_that_is_not_built_is_named(tmp_path: Path) -> None:
    (tmp_path / "fmq").mkdir()
    for path in (ROOT / "fmq").glob("*.py"):
        shutil.copy(path, tmp_path / "fmq")
    program = tmp_path / "program.py"
    program.write_text("import fmq")
    done = subprocess.run([sys.executable, program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ModuleNotFoundError: fmq: expected its extension _native in {tmp_path}, a source"
    )
    assert "pip install -e ." in last and "During handling" not in done.stderr
