"""Whatever a call to a served device is given reaches its driver as it was given."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ErrorStatus
from aionn.hal import ExecutionPreference, Priority
from fences import SyncFence

FAR_NS = 1 << 61
"""A deadline that does not come."""


class Noting:
    """Passes every call on to a real object, and notes its name and its named arguments; so does what the call makes."""

    def __init__(self, real: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self._real = real
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name == "launch":

            def launch(*arguments: Any, **named: Any) -> Any:
                self._calls.append((name, named))
                return found(*arguments, **named)

            return launch
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            self._calls.append((name, named))
            real = [
                [getattr(a, "_real", a) for a in given] if isinstance(given, list) else given
                for given in arguments
            ]
            made = await found(*real, **named)
            return Noting(made, self._calls) if hasattr(made, "execute_synchronously") else made

        return call


class Stage:
    """A client of a served device that notes its calls, with the sum of two vectors prepared on it."""

    def __init__(self, client: Any, prepared: Any, work: Any, calls: list[tuple[str, dict[str, Any]]]):
        self.client, self.prepared, self.work = client, prepared, work
        self._calls = calls

    def noted(self, name: str) -> dict[str, Any]:
        """The named arguments of the one call of that name since the last question."""
        (found,) = [named for called, named in self._calls if called == name]
        self._calls.clear()
        return found


@pytest.fixture
async def stage(serving: Any, small: Any) -> Any:
    calls: list[tuple[str, dict[str, Any]]] = []
    served = await serving(Noting(ReferenceDevice(), calls))
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    calls.clear()
    yield Stage(client, prepared, small.Sum(), calls)
    await client.aclose()


EXECUTING: list[dict[str, Any]] = [
    {"measure": True, "deadline_ns": FAR_NS, "loop_timeout_ns": 7_000_000_000},
    {"measure": False, "deadline_ns": None, "loop_timeout_ns": None},
]


@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.LOW])
@pytest.mark.parametrize("preference", [ExecutionPreference.LOW_POWER, ExecutionPreference.SUSTAINED_SPEED])
async def test_preparing_a_model(
    stage: Stage, small: Any, preference: ExecutionPreference, priority: Priority
) -> None:
    given = {"preference": preference, "priority": priority, "deadline_ns": FAR_NS}
    await stage.client.prepare_model(small.sum_model(), **given)
    assert stage.noted("prepare_model") == {**given, "cache": None}


@pytest.mark.parametrize("given", EXECUTING)
async def test_executing(stage: Stage, given: dict[str, Any]) -> None:
    await stage.prepared.execute_synchronously(stage.work.request, **given)
    assert stage.noted("launch") == given
    assert stage.work.is_right


@pytest.mark.parametrize("given", EXECUTING)
async def test_executing_with_a_priority_of_its_own(stage: Stage, given: dict[str, Any]) -> None:
    given = {**given, "priority": Priority.HIGH}
    await stage.prepared.execute_synchronously(stage.work.request, **given)
    assert stage.noted("launch") == given


@pytest.mark.parametrize("given", EXECUTING)
async def test_launching_with_a_callback(stage: Stage, given: dict[str, Any]) -> None:
    done = SyncFence()
    outcome: list[Any] = []

    def callback(*what: Any) -> None:
        outcome.append(what)
        done.signal()

    given = {**given, "priority": Priority.LOW}
    assert await stage.prepared.execute(stage.work.request, callback, **given) is ErrorStatus.NONE
    await done
    assert stage.noted("execute") == given
    assert [what[0] for what in outcome] == [ErrorStatus.NONE]
    assert stage.work.is_right


@pytest.mark.parametrize("given", EXECUTING)
async def test_launching_behind_fences(stage: Stage, given: dict[str, Any]) -> None:
    given = {**given, "duration_ns": (given["measure"] and 5_000_000_000) or None}
    launched = await stage.prepared.execute_fenced(stage.work.request, [], **given)
    if launched.fence is not None:
        await launched.fence
    assert stage.noted("execute_fenced") == given
    assert stage.work.is_right


@pytest.mark.parametrize("given", EXECUTING)
async def test_reusable_executions(stage: Stage, given: dict[str, Any]) -> None:
    deadline = {"deadline_ns": given["deadline_ns"]}
    of_request = {name: given[name] for name in ("measure", "loop_timeout_ns")}
    execution = await stage.prepared.create_reusable_execution(stage.work.request, **of_request)
    assert stage.noted("create_reusable_execution") == of_request
    await execution.execute_synchronously(**deadline)
    assert stage.noted("execute_synchronously") == deadline
    fenced = {**deadline, "duration_ns": (given["measure"] and 5_000_000_000) or None}
    launched = await execution.execute_fenced([], **fenced)
    if launched.fence is not None:
        await launched.fence
    assert stage.noted("execute_fenced") == fenced
