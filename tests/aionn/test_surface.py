"""The public surface: every name resolves, importing costs little, errors and statuses map both ways."""

from __future__ import annotations

import enum
import subprocess
import sys
import typing
from typing import Any

import pytest

import aionn
from aionn.errors import ErrorStatus, error_for_status, status_of
from aionn.realtime import CollectorMode, Mode
from aionn.runtime import settings
from aionn.runtime.executions.results import PriorityName


def test_every_public_name_resolves() -> None:
    for name in aionn.__all__:
        assert getattr(aionn, name) is not None
    assert set(aionn.__all__) <= set(dir(aionn))


@pytest.mark.thorough
def test_modules_that_messages_name_need_no_import_of_their_own() -> None:
    script = "import aionn; print(aionn.blocking.open.__name__, aionn.media.video_file.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "open video_file\n", done.stderr


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("video_file", "aionn.media"),
        ("load_tflite", "aionn.models.tflite"),
        ("load_onnx", "aionn.models.onnx"),
    ],
)
def test_name_of_another_package_is_named_with_it(name: str, home: str) -> None:
    with pytest.raises(
        AttributeError, match=f"^module 'aionn' has no attribute '{name}'; {name} is in {home}$"
    ):
        getattr(aionn, name)


def test_misspelt_name_is_named_with_the_right_one() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'aionn' has no attribute 'opne'; did you mean open\?$"
    ):
        aionn.opne  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'aionn' has no attribute 'nothing'$"):
        aionn.nothing  # noqa: B018


def test_importing_the_package_and_the_command_line_imports_no_numpy() -> None:
    script = "import sys, aionn, aionn.cli.main; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("status", [s for s in ErrorStatus if s != ErrorStatus.NONE])
def test_every_status_has_its_error_and_back(status: ErrorStatus) -> None:
    error = error_for_status(status, "message")
    assert isinstance(error, aionn.Error)
    assert error.status == status_of(error) == status
    assert str(error) == "message"


def test_status_none_is_no_error() -> None:
    with pytest.raises(ValueError, match="not an error"):
        error_for_status(ErrorStatus.NONE, "")


def test_error_classes_are_what_their_callers_catch() -> None:
    assert issubclass(aionn.MissedDeadline, TimeoutError)
    assert issubclass(aionn.InvalidArgument, ValueError)
    assert issubclass(aionn.InvalidModel, aionn.InvalidArgument)
    assert status_of(RuntimeError("a driver's bug")) == ErrorStatus.GENERAL_FAILURE


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (PriorityName, aionn.Priority),
        (settings.PreferenceName, aionn.ExecutionPreference),
        (settings.PartitionChoice, settings.PartitionMode),
        (settings.ExecutionPathChoice, settings.ExecutionPath),
        (settings.RealtimeChoice, Mode),
        (settings.CollectorChoice, CollectorMode),
    ],
)
def test_names_that_type_checkers_accept_are_those_of_the_choice(choice: Any, kind: type[enum.Enum]) -> None:
    parts = typing.get_args(choice)
    names = [one for part in parts for one in typing.get_args(part)] or list(parts)
    assert names == [one.value if issubclass(kind, enum.StrEnum) else one.name.lower() for one in kind]
