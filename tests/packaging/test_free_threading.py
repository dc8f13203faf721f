"""A free-threaded Python is rejected in a sentence: by the build and by each package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    "hook",
    [
        "get_requires_for_build_wheel",
        "get_requires_for_build_editable",
        "build_wheel",
        "build_editable",
        "prepare_metadata_for_build_wheel",
        "prepare_metadata_for_build_editable",
    ],
)
def test_build_rejects_a_free_threaded_python(
    hook: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("aionn_build", repository / "build_backend/aionn_build.py")
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    known = sysconfig.get_config_var

    def told(name: str) -> Any:
        return 1 if name == "Py_GIL_DISABLED" else known(name)

    monkeypatch.setattr(sysconfig, "get_config_var", told)
    with pytest.raises(SystemExit, match=r"^aionn: expected .* got a free-threaded build of 3\.\d+"):
        getattr(backend, hook)(*([] if hook.startswith("get") else [str(tmp_path)]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["aionn", "fences", "fmq"])
def test_import_rejects_a_free_threaded_python(package: str, repository: Path) -> None:
    # The letter that such a build has in its name; the rest of this interpreter stays as it is.
    code = f"import sys; sys.abiflags = 't'; import {package}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: {package}: expected a Python with a global interpreter lock, got a free-"
    )
