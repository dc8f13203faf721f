"""What holds for every test: a watchdog on what may hang, and a check that nothing is left behind.

A test that ends with more descriptors, threads, child processes, shared-memory mappings or talkative loggers than it began with has
failed, whatever else it showed. The check runs after all fixtures of the test are torn down, its event loop included.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

if "PYTHONPYCACHEPREFIX" not in os.environ and os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # The tests start some thousand interpreters: without bytecode each would compile all that it imports, as this one would below.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(
        Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    )

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from aionn.benchmarking.stress.samples import child_pids
from aionn.observability import log_tags
from aionn.service.client.supervisor import StartConditions
from tests.support.processes.fork_server import ForkedStarts, ForkServer, Kinds, reap_orphan
from tests.support.processes.signal_stack import is_signal_stack_lost
from tests.support.sampling import chosen

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"

WATCHDOG_S = int(os.environ.get("AIONN_TEST_WATCHDOG_S", "120"))
"""Seconds after which a test that hangs ends the whole run; more where the machine is slow, or coverage is measured."""

WATCHDOG_LONG_S = 3600

WATCHDOG_MORE = 0.5
"""How much longer it may take, as a share: the watchdog is set anew only once that time has passed, not for each test."""

SETTLE_S_MAX = 20.0
"""How long what is left may take to go: a thread that was told to end needs a moment to be scheduled, on a busy machine seconds."""

# Before a test imports ONNX Runtime itself; see ``aionn.drivers.onnxruntime``.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Before a test imports OpenVINO itself; see ``aionn.drivers.openvino.engine``.
cast(dict[str, Any], sys.modules).setdefault("openvino_telemetry", None)

os.environ["AIONN_SPARE_PROCESSES"] = "0"
"""A spare process comes by itself once a device has served for a while: tests that want one ask for it."""

# Its check compares the time that drawing values takes with a limit, and fails where the machine is busy.
settings.register_profile(
    "aionn", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("aionn"), max_examples=250)
settings.load_profile("aionn")

# Hypothesis also draws constants that occur in modules of ours that are imported: reading these takes seconds, and what a test
# draws would depend on which tests run beside it.
providers._get_local_constants = lambda: providers._local_constants


class Watchdog:
    """Ends the run if a test hangs, by the timer of ``faulthandler``.

    Setting it anew ends a thread and starts one: on a machine that is busy, waiting for that takes longer than most tests. The
    process has one such timer: whoever uses it besides takes it from the watchdog until the next test begins.

    Args:
        fd: Where the stacks of all threads are written to.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end_s: float | None = None
        self._set = faulthandler.dump_traceback_later
        self._cancel = faulthandler.cancel_dump_traceback_later
        faulthandler.dump_traceback_later = self._taken(self._set)
        faulthandler.cancel_dump_traceback_later = self._taken(self._cancel)

    def _taken(self, function: Callable[..., None]) -> Callable[..., None]:
        def take(*arguments: Any, **more: Any) -> None:
            self._end_s = None
            function(*arguments, **more)

        return take

    def watch(self, seconds: float, now_s: float) -> None:
        """A test begins, which may take so long."""
        latest_s = now_s + seconds * (1 + WATCHDOG_MORE)
        if self._end_s is None or not now_s + seconds <= self._end_s <= latest_s:
            self._set(latest_s - now_s, exit=True, file=self._fd)
            self._end_s = latest_s

    def end(self) -> None:
        """No test follows."""
        self._cancel()
        faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = self._set, self._cancel
        os.close(self._fd)


_watchdog = pytest.StashKey[Watchdog]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the terminal's standard error for the watchdog: while tests run, descriptor 2 is pytest's own file."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None, "pytest has it"
    with capture.global_and_fixture_disabled():
        config.stash[_watchdog] = Watchdog(os.dup(2))
    config.pluginmanager.register(SharedFixtures())
    if config.getoption("--long"):
        settings.load_profile("long")  # Before a module of tests is imported, which takes it.
    # These options print or write what each phase took.
    is_whole = config.option.verbose > 0 or config.option.durations is not None or config.option.xmlpath
    if hasattr(config, "workerinput") and not is_whole:
        config.pluginmanager.register(BriefWorker())


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_watchdog].end()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="also run the long forms of fuzzers, soaks and data suites"
    )
    parser.addoption(
        "--thorough", action="store_true", help="also run what takes seconds of a processor; --long does, too"
    )


LEFT_OUT = {"long": "long form: run with --long", "thorough": "thorough test: run with --thorough"}
"""Marks of the tests that the ordinary run leaves out, and what the summary says."""

_left_out = pytest.StashKey[dict[str, int]]()
"""How many tests this run leaves out, by mark."""


def _marks_left_out(config: pytest.Config) -> list[str]:
    if config.getoption("--long"):
        return []
    return ["long"] if config.getoption("--thorough") else [*LEFT_OUT]


def _count_left_out(config: pytest.Config, mark: str, count: int) -> None:
    counts = config.stash.setdefault(_left_out, {})
    counts[mark] = counts.get(mark, 0) + count


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Makes no tests of the cases that the ordinary run leaves out: each takes part of a millisecond in every worker.

    A case that the command line names is made: that runs it, or says that it is a long form.
    """
    yield
    config, calls, function = metafunc.config, metafunc._calls, metafunc.definition
    marks = _marks_left_out(config)
    if len(calls) < 2 or not marks or any("::" in word for word in config.args):
        return
    left: list[Any] = [call for call in calls if all(mark.name not in marks for mark in call.marks)]
    reason = "long"
    if any(function.get_closest_marker(mark) for mark in marks):
        # One case stands for the function, and is left out as any test with this mark.
        left, reason = calls[:1], next(mark for mark in marks if function.get_closest_marker(mark))
    elif (mark := function.get_closest_marker("sampled")) is not None:
        left = [left[position] for position in chosen([call.indices for call in left], mark.args[0])]
    if left and len(left) < len(calls):
        _count_left_out(config, reason, len(calls) - len(left))
        calls[:] = left


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests out: skipping and reporting each of a thousand takes seconds."""
    for mark in _marks_left_out(config):
        if left_out := [item for item in items if item.get_closest_marker(mark)]:
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=left_out)
            _count_left_out(config, mark, len(left_out))
    if (counts := config.stash.get(_left_out, {})) and hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Each of several workers has left out the same."""
    node.config.stash[_left_out] = getattr(node, "workeroutput", {}).get("left_out", {})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each of several workers a share of neighbours, so that one of them sets up what the tests of a module share.

    The default hands out tests in turn: each worker would start the module's driver process, and read its data.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each reason to skip once, with the remedy, instead of once for each file; ``-rs`` names the files."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    for mark, count in terminalreporter.config.stash.get(_left_out, {}).items():
        reasons += [LEFT_OUT[mark]] * count
    if reasons and not terminalreporter.hasopt("s"):
        terminalreporter.section("skipped")
        for line in grouped_skips(reasons):
            terminalreporter.write_line(line)


REMEDIES = {
    "CUDAExecutionProvider": "there is no GPU with CUDA: pip install onnxruntime-gpu instead of onnxruntime, with CUDA and cuDNN",
    "LiteRT|ai.edge.litert": "LiteRT is not installed: pip install -e '.[litert]'",
    "ONNX Runtime|onnxruntime": "ONNX Runtime is not installed: pip install -e '.[onnxruntime]'",
    "uvicorn": "uvicorn and websockets are not installed: pip install -e '.[watch]'",
    "tritonclient": "tritonclient is not installed: pip install --group test",
    "grpcio": "grpcio is not installed: pip install -e '.[oip]'",
    "nbclient": "nbclient and ipykernel are not installed: pip install --group test",
    "OpenVINO|openvino": "OpenVINO is not installed: pip install -e '.[openvino]'",
    "PyAV": "PyAV is not installed: pip install -e '.[media]'",
    "uvloop": "uvloop is not installed: pip install -e '.[uvloop]'",
    "LoadGen|mlperf_loadgen": "MLPerf LoadGen is not installed: pip install -e '.[loadgen]'",
    "scipy": "scipy is not installed: pip install --group test",
    "(shared|conformance) (conformance )?(data|models) are not": (
        "the public models and conformance data, which the repository does not contain, are not in ../shared"
    ),
    "Sphinx": "Sphinx is not installed: pip install --group docs",
    "FastAPI": "FastAPI is not installed: pip install fastapi",
    "Chromium": "Chromium is not on the PATH: install a package such as chromium",
    "newer Python": "gcc or a newer Python with its headers is missing: install gcc and a package such as python3.13-dev",
    "no C compiler": "there is no C compiler: install a package such as gcc",
}
"""Reasons to skip, as patterns, and what the summary says instead: the reason and what a newcomer can do."""


def grouped_skips(reasons: Iterable[str]) -> list[str]:
    """One line for each reason, with the number of tests, the most frequent one first."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        lines = [line for pattern, line in REMEDIES.items() if re.search(pattern, reason)]
        counts[lines[0] if lines else reason.removeprefix("Skipped: ")] += 1
    return [f"{count} x {line}" for line, count in counts.most_common()]


_LOGGERS = [logging.getLogger(f"aionn.{tag}") for tag in log_tags.TAGS]


class Belongings:
    """What this process holds now.

    Args:
        earlier: What it held earlier. As long as the size of all its mappings is the same, these are not listed anew, which takes
            milliseconds, and as long as the numbers of its descriptors are the same, neither are what these stand for: what has
            come exactly when others have gone is found by a look without this argument.
    """

    def __init__(self, earlier: Belongings | None = None) -> None:
        self.numbers = os.listdir("/proc/self/fd")
        if earlier is not None and earlier.numbers == self.numbers:
            self.descriptors = earlier.descriptors
        else:
            self.descriptors = Counter(_descriptors())
        self.threads = Counter(thread.name for thread in threading.enumerate())
        self.children = child_pids(os.getpid())
        self.levels = Counter(f"{logger.name} at {logger.level}" for logger in _LOGGERS if logger.level)
        self.lacks_signal_stack = is_signal_stack_lost()
        self.size_pages: int | None = _size_pages()
        if earlier is not None and earlier.size_pages == self.size_pages:
            self.mappings = earlier.mappings
        else:
            self.mappings = Counter(_shared_mappings())

    def shift(self, before: Belongings, after: Belongings) -> None:
        """Adds what has come between two looks, and takes away what has gone."""
        for name in ("descriptors", "threads", "levels", "mappings"):
            own, then, now = getattr(self, name), getattr(before, name), getattr(after, name)
            setattr(self, name, own + (now - then) - (then - now))
        self.children = (self.children | (after.children - before.children)) - (
            before.children - after.children
        )
        self.size_pages, self.numbers = None, []

    def more_than(self, before: Belongings) -> list[str]:
        """One line per thing that was not there before."""
        lines = [f"descriptor of {target}" for target in _gained(self.descriptors, before.descriptors)]
        lines += [f"thread {name}" for name in _gained(self.threads, before.threads)]
        lines += [f"child process {pid}" for pid in sorted(self.children - before.children)]
        lines += [f"logger {level}" for level in _gained(self.levels, before.levels)]
        lines += [f"mapping of {name}" for name in _gained(self.mappings, before.mappings)]
        if self.lacks_signal_stack and not before.lacks_signal_stack:
            lines.append("a signal stack that is not mapped: the next signal ends this process")
        return lines


def _gained(now: Counter[str], then: Counter[str]) -> Iterable[str]:
    """What has come. After most tests nothing has: comparing says so in a tenth of the time that subtracting takes."""
    return () if now is then or dict.__eq__(now, then) else (now - then).elements()


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.endswith("/fd") and "/proc/" not in target:
            yield target.split(":[")[0] if ":[" in target else target


def _size_pages() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split(None, 1)[0])


def _shared_mappings() -> Iterator[str]:
    content = Path("/proc/self/maps").read_bytes()
    if b"/memfd:" not in content and b"/dev/shm/" not in content:
        return
    for line in content.decode().splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:
            yield line.split(None, 5)[-1]


def _left_over(before: Belongings, *, is_thorough: bool) -> tuple[Belongings, list[str]]:
    """What is held now, and what of it was not held before, once that has had time to go."""
    now = Belongings(None if is_thorough else before)
    left = now.more_than(before)
    if left:
        end_s = time.monotonic() + SETTLE_S_MAX
        gc.collect(1)  # What a test made is young; looking through everything takes a tenth of a second.
        while (left := (now := Belongings()).more_than(before)) and time.monotonic() < end_s:
            for pid in now.children - before.children:
                reap_orphan(pid)
            time.sleep(0.01)
            gc.collect()
    return now, left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    seconds = WATCHDOG_LONG_S if item.get_closest_marker("long") else WATCHDOG_S
    item.config.stash[_watchdog].watch(seconds, time.monotonic())
    return (yield)


class BriefWorker:
    """Has a worker report a test that passes by two messages instead of six.

    The others are the beginning and the end of each test, its setup and its teardown, none of which is printed. Most tests last a
    millisecond or two; sending and receiving these messages takes as long.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" or not report.passed or report.sections:
                item.ihook.pytest_runtest_logreport(report=report)
        return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Without the collector: modules and items live to the end, and looking for garbage among them takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    # Modules and test items live to the end: the collector need not look at them after each test.
    gc.collect()
    gc.freeze()


OBJECTS_MAX = 20_000
"""Objects that live long and that a collection looks at: some milliseconds, and some tests collect hundreds of times."""


def _freeze_what_stays() -> None:
    """Takes what modules leave, such as what they have imported and cached, away from the collections of later tests."""
    if len(gc.get_objects(generation=2)) > OBJECTS_MAX:
        gc.collect()
        gc.freeze()


_held = pytest.StashKey[Belongings]()
"""What was held after the test before: nothing of ours runs between two tests, and looking costs milliseconds."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    mark = item.get_closest_marker("forked")
    item.session.stash[_kinds] = mark.args[0] if mark else "product"
    if _held not in item.session.stash:
        item.session.stash[_held] = Belongings()
    return (yield)


_shared = pytest.StashKey[dict[object, tuple[Belongings, Belongings]]]()
"""What was held before and after each fixture of several tests was set up that is still there."""

_begun = pytest.StashKey[list[Belongings]]()
"""What was held before those that are being set up, which may set up others first."""


class SharedFixtures:
    """A plugin of its own: pytest asks no conftest below the root about fixtures of the session."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Iterator[object]:
        """What a fixture of several tests holds is not left behind by the test that comes first."""
        if fixturedef.scope == "function":
            return (yield)
        stash = request.session.stash
        begun = stash.setdefault(_begun, [])
        before = Belongings()
        begun.append(before)
        try:
            return (yield)
        finally:
            begun.pop()
            after = Belongings()
            stash.setdefault(_shared, {})[fixturedef] = before, after
            for held in (stash[_held], *begun):
                held.shift(before, after)

    def pytest_fixture_post_finalizer(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> None:
        before, after = request.session.stash.get(_shared, {}).pop(fixturedef, (None, None))
        if before is not None and after is not None:
            request.session.stash[_held].shift(after, before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    result = yield
    # pytest keeps the fixtures' values until the test is reported; what they hold counts as given back here.
    getattr(item, "funcargs", {}).clear()
    is_last = nextitem is None or nextitem.path != item.path
    item.session.stash[_held], left = _left_over(item.session.stash[_held], is_thorough=is_last)
    if nextitem is not None and is_last:
        _freeze_what_stays()
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)
    return result


MODULES = (
    "tests.support.processes.driver_imports",
    "shutil",  # with compression: what makes a temporary folder imports it
    *("aionn.blocking", "aionn.cli.commands", "aionn.media", "aionn.reports.terminal"),
    *("aionn.benchmarking.stress.bodies", "aionn.conformance.workers", "aionn.media.network_streams.process"),
    *("aionn.fleet.device", "aionn.runtime.runtime"),
    *("email.parser", "importlib.metadata", "importlib.resources", "numpy.ma", "numpy.random"),
    *(["av"] if importlib.util.find_spec("av") else []),
)
"""Imports of the process from which drivers, programs, and processes that compute for a command or decode a stream are forked."""

_kinds = pytest.StashKey[Kinds]()
"""Which of the processes that the present test starts are forked."""


@pytest.fixture(scope="session", autouse=True)
def forked_starts(request: pytest.FixtureRequest) -> Iterator[ForkedStarts | None]:
    """Driver processes are forked from one that has imported what they need; with ``--long`` each is executed.

    The mark ``forked("none")`` is for tests whose claims are about the start of a process, ``forked("any")`` for tests that start
    Python themselves, and make no claim about that.
    """
    if request.config.getoption("--long"):
        yield None
        return
    stash = request.session.stash
    environment = StartConditions.now("reference", "reference", None).environment
    server = ForkServer(MODULES, environment)
    starts = ForkedStarts(server, lambda: stash[_kinds])
    yield starts
    starts.end()
    server.close()


@pytest.fixture
def own_log_tags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes back the log tags that a test chooses: they hold for the whole process, and for driver processes started later."""
    monkeypatch.setattr(log_tags, "_chosen", ())
    monkeypatch.setattr(log_tags, "_levels_before", {})
    before = [logger.level for logger in _LOGGERS]
    yield
    for logger, level in zip(_LOGGERS, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def example_data(repository: Path) -> Path:
    """The small models and media that are shipped."""
    return repository / "examples" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data beside the repository; the test is skipped where they are not."""
    if not SHARED.is_dir():
        pytest.skip("the shared data are not beside the repository")
    return SHARED
