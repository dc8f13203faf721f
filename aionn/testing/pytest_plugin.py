"""The pytest plugin: virtual time by a marker, and fixtures for the clock, simulated devices and a runtime on them.

Owns the marker ``aionn`` and the fixtures ``virtual_clock``, ``aionn_devices`` and ``aionn_runtime``. Does nothing for tests
without the marker, and imports nothing of ours before the first test with it.

Invariants:
1. Loops that are made for a marked test and its function-scoped fixtures are virtual; loops that other tests share are not.
2. A marked coroutine test that ran on another loop fails: it would have been a test of real time.

Works with pytest-asyncio (1.0 and later, both modes) and with the plugin of anyio: what both have in common is that they ask
asyncio for a new loop.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aionn.drivers.simulated.driver import SimulatedDevice
    from aionn.runtime.runtime import Runtime
    from aionn.testing.clock import VirtualClock

__all__ = ["virtual_clock"]

_OPTIONS = {"virtual_time", "devices", "start_s", "stuck_s", "pin_descriptors"}
_clock_key = pytest.StashKey["VirtualClock"]()


def pytest_configure(config: pytest.Config) -> None:
    """Documents the marker, and adds the fixture that needs an event loop."""
    config.addinivalue_line(
        "markers",
        "aionn(virtual_time=False, devices=(), start_s=0.0, stuck_s=10.0, pin_descriptors=True): virtual_time=True runs the test "
        "on a clock that jumps to the next timer when nothing can run; devices names simulated devices for aionn_runtime",
    )
    decorate: Callable[..., Any] = pytest.fixture
    if config.pluginmanager.has_plugin("asyncio"):
        # In its strict mode pytest-asyncio serves only fixtures that it has made itself.
        import pytest_asyncio

        decorate = pytest_asyncio.fixture
    fixtures = ModuleType("aionn.testing.fixtures")
    vars(fixtures)["aionn_runtime"] = decorate(name="aionn_runtime")(_runtime)
    config.pluginmanager.register(fixtures, "aionn-fixtures")


def _options(node: pytest.Item | pytest.Collector) -> dict[str, Any]:
    """The arguments of the closest marker; empty without one."""
    marker = node.get_closest_marker("aionn")
    if marker is None:
        return {}
    unknown = sorted(marker.kwargs.keys() - _OPTIONS)
    if marker.args or unknown:
        pytest.fail(
            f"{node.nodeid}: mark.aionn: expected keywords among {', '.join(sorted(_OPTIONS))}; "
            f"got {', '.join(map(repr, marker.args)) or ', '.join(unknown)}",
            pytrace=False,
        )
    return dict(marker.kwargs)


def _clock_of(item: pytest.Item) -> VirtualClock | None:
    """The clock of a test; None without virtual time."""
    options = _options(item)
    if not options.pop("virtual_time", False):
        return None
    if _clock_key not in item.stash:
        from aionn.testing.clock import VirtualClock

        options.pop("devices", None)
        item.stash[_clock_key] = VirtualClock(**options)
    return item.stash[_clock_key]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Loops for the fixtures of one marked test are virtual; those of wider scope belong to other tests as well."""
    clock = _clock_of(request.node) if fixturedef.scope == "function" else None
    # Fixtures nest: one of wider scope may be asked for while a narrower one is set up.
    if clock is None and "aionn.testing.clock" not in sys.modules:
        return (yield)
    from aionn.testing.clock import new_loops

    with new_loops(clock):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Loops that a marked test makes itself are virtual; its own must have been."""
    clock = _clock_of(pyfuncitem)
    if clock is None:
        return (yield)
    from aionn.testing.clock import new_loops

    runs_before = clock.run_count
    with new_loops(clock):
        result = yield
    if clock.run_count == runs_before and inspect.iscoroutinefunction(inspect.unwrap(pyfuncitem.obj)):
        pytest.fail(
            "this test asked for virtual time and ran on another event loop: a loop of its own is needed (loop_scope='function'), "
            "made without a loop factory or event_loop_policy fixture that chooses another kind",
            pytrace=False,
        )
    return result


@pytest.fixture
def virtual_clock(request: pytest.FixtureRequest) -> VirtualClock:
    """The clock of a test that is marked ``aionn(virtual_time=True)``."""
    clock = _clock_of(request.node)
    if clock is None:
        pytest.fail(
            "virtual_clock: the test needs the marker @pytest.mark.aionn(virtual_time=True)", pytrace=False
        )
    return clock


@pytest.fixture
def aionn_devices(request: pytest.FixtureRequest) -> list[SimulatedDevice]:
    """The devices of ``aionn_runtime``: simulated ones of the profiles that the marker names. Override it to give others."""
    from aionn.drivers.simulated.driver import SimulatedDevice

    names = _options(request.node).get("devices", ())
    return [SimulatedDevice(name) for name in ([names] if isinstance(names, str) else names)]


async def _runtime(aionn_devices: list[SimulatedDevice]) -> AsyncIterator[Runtime]:
    """An open runtime on ``aionn_devices`` alone."""
    import aionn

    async with aionn.open(devices=aionn_devices) as runtime:
        yield runtime
