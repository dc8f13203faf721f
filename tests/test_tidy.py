"""The project's rules that a machine can check: who imports whom, names, sizes, and what must not be said.

Each rule has a test that feeds it bad snippets; a needless excuse fails as well. Source: docs/architecture.md."""

import ast
import pathlib
import re
import subprocess
import tomllib
from collections import Counter

import pytest

from tests.support.syntax_trees import nodes, parse

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("aionn", "fmq", "fences")

LINES_PER_FILE_MAX = 600
LINES_PER_FUNCTION_MAX = 70  # Without the docstring.
LONG_FILES: dict[str, str] = {
    "fmq/_native.c": "one file against the limited API: the ring, the event flag and their module state share inline functions",
}
LONG_FUNCTIONS: dict[str, str] = {}
SLEEPERS: dict[str, str] = {
    "aionn/platform/descriptors.py": "a thread that closes, while another releases what it closes",
    "aionn/service/host/process.py": "the thread that gives a process without a client its last seconds, as its loop may be stuck",
    "aionn/service/wire/peers.py": "the threads that prepare models and those of bursts leave the interpreter to other clients",
}
"""``file: reason`` for files whose code may call time.sleep; it must run on a thread that is no event loop's."""
BAD_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}

LOWEST = {"aionn.errors", "aionn.hal", "aionn.observability", "aionn.platform", "fences"}
MODEL_LAYER = {"aionn.ops", "aionn.models", "aionn.validation", "aionn.interpreter"}
DRIVER_LAYER = LOWEST | MODEL_LAYER | {"aionn.realtime", "aionn.scheduler", "fmq"}
RUNTIME_LAYER = DRIVER_LAYER | {"aionn.burst", "aionn.drivers.registry", "aionn.fleet", "aionn.service"}
PRODUCT = RUNTIME_LAYER | {"aionn.reports", "aionn.runtime", "aionn.media", "aionn.simulation", "aionn.watch"}

# Each row speaks for what is below it, and a unit may always import itself.
MAY_IMPORT: dict[str, set[str]] = {
    **{key: set() for key in ("fences", "fmq")},
    "aionn.errors": set(),
    **{key: {"aionn.errors", "aionn.platform"} for key in ("aionn.media", "aionn.observability")},
    "aionn.platform": {"aionn.errors", "fmq"},
    "aionn.hal": {"aionn.errors", "fences", "fmq"},
    "aionn.ops": {"aionn.hal", "aionn.errors"},
    "aionn.models": {"aionn.ops", "aionn.hal", "aionn.errors", "aionn.platform"},
    **{key: {"aionn.ops", "aionn.hal", "aionn.errors"} for key in ("aionn.validation", "aionn.interpreter")},
    "aionn.burst": LOWEST | {"aionn.validation", "fmq"},
    # Each driver is a unit of its own, see unit_of; the kit is what they are made from.
    "aionn.drivers": set(),
    "aionn.drivers.kit": DRIVER_LAYER,
    "aionn.drivers.registry": DRIVER_LAYER,
    "aionn.drivers.*": DRIVER_LAYER
    | {"aionn.drivers.kit", "aionn.drivers.reference", "aionn.drivers.registry"},
    "aionn.scheduler": LOWEST,
    "aionn.service": RUNTIME_LAYER
    - {"aionn.fleet", "aionn.models", "aionn.ops", "aionn.interpreter", "aionn.service"},
    "aionn.fleet": LOWEST | {"aionn.drivers.kit", "aionn.scheduler", "aionn.service", "aionn.validation"},
    "aionn.runtime": RUNTIME_LAYER | {"aionn.reports"},
    "aionn.realtime": {"aionn.errors"},
    "aionn.reports": {"aionn.errors", "aionn.observability"},
    "aionn.watch": LOWEST | {"aionn.media", "aionn.reports", "aionn.runtime", "aionn.scheduler"},
    "aionn.oip": {"aionn"},
    "aionn.ray": {"aionn", "aionn.platform"},
    "aionn.simulation": LOWEST
    | {"aionn.models", "aionn.drivers.kit", "aionn.drivers.simulated", "aionn.reports", "aionn.scheduler"},
    "aionn.benchmarking": PRODUCT,
    "aionn.conformance": PRODUCT | {"aionn", "aionn.drivers.*", "aionn.testing"},
    "aionn.testing": PRODUCT | {"aionn", "aionn.drivers.*", "aionn.conformance"},
    "aionn.cli": PRODUCT
    | {"aionn", "aionn.benchmarking", "aionn.drivers.*", "aionn.oip", "aionn.testing", "aionn.conformance"},
    "aionn.__main__": {"aionn.cli"},
    "aionn.blocking": PRODUCT,
    "aionn": PRODUCT | {"aionn.blocking"},
}

HOMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ai_edge_litert", "tflite_runtime"), ("aionn/drivers/litert/",)),
    "tensorflow": (),
    "openvino": ("aionn/drivers/openvino/",),
    "onnxruntime": ("aionn/drivers/onnxruntime/",),
    **dict.fromkeys(("av", "sounddevice"), ("aionn/media/",)),
    "jeepney": ("aionn/realtime/realtimekit.py",),
    "opentelemetry": ("aionn/runtime/metrics/spans.py",),
    "uvicorn": ("aionn/watch/process.py", "aionn/oip/rest_server.py"),
    "grpc": ("aionn/oip/grpc_server.py",),
    "ray": ("aionn/ray/cluster.py",),
    "mlperf_loadgen": ("aionn/benchmarking/loadgen.py",),
    "asyncio": (
        "aionn/benchmarking/loadgen.py",
        "aionn/benchmarking/stress/",
        "aionn/drivers/kit/asynchronous.py",
        "aionn/fleet/",
        "aionn/hal/launch.py",
        *("aionn/media/live/", "aionn/media/joining.py", "aionn/media/source.py"),
        *("aionn/oip/", "aionn/ray/"),
        *("aionn/platform/kernel_timer.py", "aionn/platform/loops.py"),
        *("aionn/runtime/background.py", "aionn/runtime/clock.py"),
        "aionn/testing/clock.py",
        "aionn/testing/links.py",
        "aionn/watch/",
        "fences/waiting.py",
        "fmq/aio.py",
        "fmq/watch.py",
    ),
    "html": ("aionn/reports/html_page.py",),
    "rich": ("aionn/reports/terminal.py",),
    "pytest": ("aionn/testing/pytest_plugin.py", "aionn/conformance/pytest_suite.py"),
}
"""Imports that have a home: nothing else in the packages may import them."""


def module_name(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The part of the table that a module belongs to; each driver is a unit of its own, and so are the kit and the registry."""
    parts = module.split(".")
    if parts[:2] == ["aionn", "drivers"]:
        return ".".join(parts[:3])
    return ".".join(parts[:2]) if parts[0] == "aionn" else parts[0]


def row_of(unit: str) -> set[str] | None:
    """What a unit may import; None if the table does not know it."""
    if unit.startswith("aionn.drivers."):
        return MAY_IMPORT.get(unit, MAY_IMPORT["aionn.drivers.*"])
    return MAY_IMPORT.get(unit)


def imports_of(path: str, tree: ast.Module, modules: set[str]) -> list[tuple[int, str]]:
    """``(line, module)`` of every import statement, wherever it stands; TYPE_CHECKING blocks count."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package.pop()
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                found.append((node.lineno, inner if inner in modules else origin))
    return found


def import_breaches(sources: dict[str, str]) -> list[str]:
    """Imports that the table does not allow."""
    modules = {module_name(path) for path in sources}
    breaches = []
    for path, text in sources.items():
        unit = unit_of(module_name(path))
        allowed = row_of(unit)
        if allowed is None:
            breaches.append(f"{path}: {unit} has no row in the table")
            continue
        any_driver = "aionn.drivers.*" in allowed
        for line, target in dict.fromkeys(imports_of(path, parse(text), modules)):
            goal = unit_of(target)
            fine = goal in allowed or goal == unit or (any_driver and goal.startswith("aionn.drivers."))
            if target.split(".")[0] in PACKAGES and not fine:
                breaches.append(f"{path}:{line}: {unit} may not import {target}")
    return breaches


def cycles(sources: dict[str, str]) -> list[str]:
    """Circles of units that import each other."""
    modules = {module_name(path) for path in sources}
    graph: dict[str, set[str]] = {}
    for path, text in sources.items():
        unit = unit_of(module_name(path))
        targets = {
            unit_of(t) for _, t in imports_of(path, parse(text), modules) if t.split(".")[0] in PACKAGES
        }
        graph.setdefault(unit, set()).update(targets - {unit})
    # Take away what imports nothing that is left, again and again: what stays is in a circle or leads into one.
    while free := [unit for unit, targets in graph.items() if not targets & graph.keys()]:
        for unit in free:
            del graph[unit]
    return [f"{unit} imports {', '.join(sorted(targets & graph.keys()))}" for unit, targets in graph.items()]


def home_breaches(sources: dict[str, str]) -> list[str]:
    """Imports of engines, PyAV and asyncio away from their homes."""
    breaches = []
    for path, text in sources.items():
        for line, target in imports_of(path, parse(text), set()):
            homes = HOMES.get(target.split(".")[0])
            if homes is not None and not path.startswith(homes):
                breaches.append(
                    f"{path}:{line}: {target} may be imported only in {', '.join(homes) or 'nothing of ours'}"
                )
    return breaches


def name_breaches(paths: list[str]) -> list[str]:
    """Files and folders with names that say nothing."""
    return [
        f"{path}: {part!r} says nothing about its subject"
        for path in paths
        for part in pathlib.PurePath(path).with_suffix("").parts
        if part.strip("_").lower() in BAD_NAMES
    ]


def print_breaches(sources: dict[str, str]) -> list[str]:
    """Calls of print outside of the command line."""
    return [
        f"{path}:{node.lineno}: print"
        for path, text in sources.items()
        if not path.startswith("aionn/cli/")
        for node in nodes(parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def sleeps(sources: dict[str, str]) -> list[tuple[str, int]]:
    """``(file, line)`` of every use of time.sleep, under whatever name."""
    found = []
    for path, text in sources.items():
        tree = parse(text)
        names = {"time"}
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                names |= {a.asname for a in node.names if a.name == "time" and a.asname}
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                found += [(path, node.lineno) for a in node.names if a.name == "sleep"]
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and node.attr == "sleep" and isinstance(node.value, ast.Name):
                found += [(path, node.lineno)] * (node.value.id in names)
    return found


def long_files(sources: dict[str, str]) -> dict[str, int]:
    counts = {path: len(text.splitlines()) for path, text in sources.items()}
    return {path: count for path, count in counts.items() if count > LINES_PER_FILE_MAX}


def long_functions(sources: dict[str, str]) -> dict[str, int]:
    """``file:function`` and its lines, without its docstring."""
    found = {}
    for path, text in sources.items():
        for node in nodes(parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                first = node.body[0]
                if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False) is not None:
                    lines -= (first.end_lineno or first.lineno) - first.lineno + 1
                if lines > LINES_PER_FUNCTION_MAX:
                    found[f"{path}:{node.name}"] = lines
    return found


def unused_modules(sources: dict[str, str], entry_points: set[str], documentation: str = "") -> list[str]:
    """Modules that no way leads to from an entry point, or from a module that the documentation names in full.

    Some are loaded by name: a string constant counts that is a module's full name (with or without ``:attribute``), or, in its own
    package, its last part. A module that only tests use belongs to ``tests/support``.
    """
    modules = {module_name(path): path for path in sources}
    named: dict[str, set[str]] = {}
    for path, text in sources.items():
        tree = parse(text)
        own = module_name(path)
        package = own if path.endswith("__init__.py") else own.rpartition(".")[0]
        named[own] = {target for _, target in imports_of(path, tree, set(modules))}
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named[own] |= {node.value.partition(":")[0], f"{package}.{node.value}"}
    used: set[str] = set()
    found = entry_points | {n.replace("/", ".") for n in re.findall(r"\baionn(?:[./]\w+)+", documentation)}
    found |= {name.removesuffix(".py") for name in found}
    while found:
        # Importing a module imports the packages around it.
        found |= {name.rsplit(".", depth)[0] for name in found for depth in range(1, name.count(".") + 1)}
        found |= {f"{name}.__main__" for name in found}
        used |= found
        found = set().union(*(named.get(name, set()) for name in found)) - used
    return [path for module, path in modules.items() if module not in used]


def place_breaches(texts: dict[str, str]) -> list[str]:
    """Lines that name a place of one machine. The names are put together here so that this file does not hold them."""
    places = tuple(f"/{folder}/" for folder in ("work", "root"))
    return [
        f"{path}:{number}: {place}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for place in places
        if place in line
    ]


def excused(found: dict[str, int], table: dict[str, str]) -> tuple[dict[str, int], list[str]]:
    """What is found and not in the table, and what the table excuses without need."""
    return {k: v for k, v in found.items() if k not in table}, [k for k in table if k not in found]


# --- The rules, applied -------------------------------------------------------------------------------------------------------


def read(pattern_roots: tuple[str, ...], suffixes: tuple[str, ...]) -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for root in pattern_roots
        for path in sorted((ROOT / root).rglob("*"))
        if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts
    }


def syntax_breaches(sources: dict[str, str]) -> list[str]:
    """Files that are no Python."""
    breaches = []
    for path, text in sources.items():
        try:
            parse(text)
        except SyntaxError as error:
            breaches.append(f"{path}:{error.lineno}: {error.msg}")
    return breaches


@pytest.fixture(scope="module")
def package_sources() -> dict[str, str]:
    # A file that does not parse fails one test, below, and not all.
    sources = read(PACKAGES, (".py",))
    return {path: text for path, text in sources.items() if not syntax_breaches({path: text})}


@pytest.fixture(scope="module")
def tracked_texts() -> dict[str, str]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    texts = {}
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and b"\0" not in (content := path.read_bytes()):
            texts[name] = content.decode(errors="replace")
    return texts


def report(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(breaches)


def test_every_file_is_python():
    report(syntax_breaches(read(PACKAGES, (".py",))))


def test_imports_follow_the_table(package_sources):
    report(import_breaches(package_sources))


def test_units_import_in_no_circle(package_sources):
    report(cycles(package_sources))


def test_engines_and_asyncio_stay_in_their_homes(package_sources):
    report(home_breaches(package_sources))


def test_no_name_says_nothing():
    roots = (*PACKAGES, "tests", "benchmarks", "examples", "docs")
    report(name_breaches(list(read(roots, (".py", ".c", ".md")))))


def test_only_the_command_line_prints(package_sources):
    report(print_breaches(package_sources))


def test_nothing_sleeps_but_the_named(package_sources):
    found = sleeps(package_sources)
    report([f"{path}:{line}: time.sleep" for path, line in found if path not in SLEEPERS])
    assert set(SLEEPERS) <= {path for path, _ in found}, "an excuse that is no longer needed"


def test_files_are_of_a_readable_length():
    sources = read((*PACKAGES, "tests", "benchmarks", "examples", "build_backend"), (".py", ".c"))
    found, needless = excused(long_files(sources), LONG_FILES)
    report([f"{path}: {lines} lines, at most {LINES_PER_FILE_MAX}" for path, lines in found.items()])
    report([f"{path} is excused without need" for path in needless])


def test_functions_are_of_a_readable_length(package_sources):
    found, needless = excused(long_functions(package_sources), LONG_FUNCTIONS)
    report([f"{name}: {lines} lines, at most {LINES_PER_FUNCTION_MAX}" for name, lines in found.items()])
    report([f"{name} is excused without need" for name in needless])


def test_every_module_is_used_by_the_product_or_documented(package_sources):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry_points = {*PACKAGES, "aionn.__main__"}
    for scripts in (project["scripts"], *project["entry-points"].values()):
        entry_points |= {script.partition(":")[0] for script in scripts.values()}
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))))
    unused = unused_modules(package_sources, entry_points, pages)
    report([f"{path}: nothing imports it, and no page names it" for path in unused])


def test_every_operation_is_defined_once():
    from aionn.hal import OperationType

    try:
        import aionn.ops
    except ImportError as error:
        pytest.skip(f"aionn.ops cannot be imported: {error}")
    import importlib

    counts = Counter(
        contract.type
        for family in aionn.ops.FAMILIES
        for contract in importlib.import_module(f"aionn.ops.{family}").OPERATIONS
    )
    expected = {kind for kind in OperationType if not kind.name.startswith("OEM")}
    assert set(counts) == set(aionn.ops.CONTRACTS) == expected
    assert set(counts.values()) == {1}


def test_no_text_names_a_place_of_one_machine(tracked_texts):
    report(place_breaches(tracked_texts))


# --- The rules, tested --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("fmq/queue.py", "import fences"),
        ("fences/fence.py", "from aionn.errors import Error"),
        ("aionn/errors.py", "import aionn.hal"),
        ("aionn/hal/model.py", "from aionn import ops"),
        ("aionn/hal/model.py", "from ..ops import signature"),
        (
            "aionn/hal/model.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import aionn.ops.signature",
        ),
        ("aionn/hal/model.py", "import aionn"),
        ("aionn/hal/model.py", "from aionn import open"),
        ("aionn/ops/images/pooling.py", "def f():\n    from aionn.interpreter import run"),
        ("aionn/validation.py", "import aionn.models"),
        ("aionn/burst/server.py", "import aionn.scheduler"),
        ("aionn/drivers/litert/driver.py", "import aionn.drivers.simulated"),
        ("aionn/drivers/litert/driver.py", "from .. import simulated"),
        ("aionn/drivers/simulated.py", "import aionn.burst.server"),
        ("aionn/drivers/kit/blocking.py", "import aionn.drivers.reference"),
        ("aionn/drivers/registry.py", "import aionn.drivers.reference"),
        ("aionn/scheduler/planning_policy.py", "import aionn.drivers.registry"),
        ("aionn/service/host.py", "import aionn.drivers.reference"),
        ("aionn/runtime/open.py", "import aionn.drivers.reference"),
        ("aionn/runtime/open.py", "import aionn.media"),
        ("aionn/runtime/open.py", "import aionn.testing.clock"),
        ("aionn/media/video.py", "import aionn.hal"),
        ("aionn/__init__.py", "from aionn.cli import main"),
        ("aionn/brand_new/x.py", "import aionn.cli"),
    ],
)
def test_import_rule_catches(path, text):
    sources = {
        path: text,
        "aionn/ops/__init__.py": "",
        "aionn/ops/signature.py": "",
        "aionn/drivers/simulated.py": "",
    }
    sources[path] = text
    assert len(import_breaches(sources)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "aionn/hal/device.py",
            "import fences\nfrom aionn.errors import Error\nfrom . import model\nimport numpy",
        ),
        ("aionn/drivers/litert/driver.py", "import aionn.drivers.reference\nfrom .lowering import lower"),
        (
            "aionn/drivers/simulated.py",
            "from aionn.drivers import registry\nfrom aionn.drivers.kit import blocking",
        ),
        ("aionn/drivers/kit/fenced.py", "from . import blocking"),
        (
            "aionn/runtime/open.py",
            "from aionn.drivers.registry import names\nimport aionn.service.client, fmq",
        ),
        ("aionn/cli/run.py", "import aionn\nimport aionn.drivers.reference\nimport aionn.conformance.cts"),
        ("aionn/__init__.py", "from aionn.runtime import open\nfrom . import errors"),
    ],
)
def test_import_rule_lets_pass(path, text):
    others = (
        "aionn/drivers/registry.py",
        "aionn/drivers/__init__.py",
        "aionn/errors.py",
        "aionn/hal/model.py",
    )
    assert import_breaches({**dict.fromkeys(others, ""), path: text}) == []


def test_cycle_rule_catches_a_circle_and_nothing_else():
    line = {"aionn/hal/a.py": "import fences", "fences/a.py": "", "aionn/ops/a.py": "import aionn.hal.a"}
    assert cycles(line) == []
    line["fences/a.py"] = "import aionn.ops.a"
    assert len(cycles(line)) == 3


def test_home_rule_catches():
    bad = {
        "aionn/runtime/a.py": "def f():\n    import ai_edge_litert.interpreter",
        "aionn/drivers/openvino/a.py": "import onnxruntime",
        "aionn/drivers/b.py": "from openvino import Core",
        "aionn/cli/a.py": "import av",
        "aionn/media/a.py": "import asyncio",
        "fmq/queue.py": "from asyncio import Event",
        "aionn/testing/models.py": "import pytest",
        "aionn/runtime/page.py": "from html import escape",
        "aionn/cli/commands/run.py": "from rich.markup import escape",
    }
    assert len(home_breaches(bad)) == len(bad)
    good = {
        "aionn/drivers/litert/lowering.py": "import ai_edge_litert",
        "aionn/media/a.py": "import av.error",
        "fmq/aio.py": "import asyncio",
        "aionn/ops/a.py": "import average, asyncio_free",
    }
    assert home_breaches(good) == []


def test_syntax_rule_catches():
    assert syntax_breaches({"a.py": "x = 1", "b.py": "x =\n"}) == ["b.py:1: invalid syntax"]


def test_name_rule_catches():
    bad = ["aionn/utils.py", "fmq/common/ring.py", "aionn/hal/_helpers.py", "tests/misc.py", "fences/Base.c"]
    assert len(name_breaches(bad)) == len(bad)
    assert name_breaches(["aionn/ops/numerics/geometry.py", "aionn/based.py", "docs/common_words.md"]) == []


def test_print_rule_catches():
    assert len(print_breaches({"aionn/runtime/a.py": "print('x')", "fmq/a.py": "f = lambda: print()"})) == 2
    assert print_breaches({"aionn/cli/a.py": "print()", "aionn/a.py": "console.print()\n'''print()'''"}) == []


def test_sleep_rule_catches():
    bad = {
        "a.py": "import time\ntime.sleep(1)",
        "b.py": "from time import sleep",
        "c.py": "import time as t\nt.sleep(1)",
    }
    assert sleeps(bad) == [("a.py", 2), ("b.py", 1), ("c.py", 2)]
    assert sleeps({"a.py": "import anyio, time\nanyio.sleep(1)\ntime.monotonic()"}) == []


def test_length_rules_catch():
    body = "    x = 1\n"
    assert long_files({"a.py": "\n" * 601, "b.py": "\n" * 600}) == {"a.py": 601}
    assert long_functions({"a.py": "async def f():\n" + body * 70}) == {"a.py:f": 71}
    assert long_functions({"a.py": "class A:\n  def f():\n" + body * 69}) == {}
    docstring = '    """' + "\n" * 50 + '    """\n'
    assert long_functions({"a.py": "def f():\n" + docstring + body * 69}) == {}
    assert long_functions({"a.py": "def f():\n" + docstring + body * 70}) == {"a.py:f": 71}
    assert excused({"a.py": 601}, {"a.py": "why", "b.py": "gone"}) == ({}, ["b.py"])


def test_use_rule_catches():
    sources = {
        "aionn/__init__.py": "import aionn.a",
        "aionn/a.py": "import aionn.a",
        "aionn/dead.py": "import aionn.dead",
        "aionn/ops/__init__.py": "FAMILIES = ('images.pooling',)",
        "aionn/ops/images/pooling.py": "",
        "aionn/ops/forgotten.py": "",
        "aionn/drivers/__init__.py": "",
        "aionn/drivers/registry.py": "{'x': 'aionn.drivers.x.driver:create'}",
        "aionn/drivers/x/__init__.py": "",
        "aionn/drivers/x/driver.py": "",
        "aionn/testing/__init__.py": "",
        "aionn/testing/clock.py": "",
        "aionn/testing/pair.py": "import aionn.testing.pair_run",
        "aionn/testing/pair_run.py": "import aionn.testing.pair",
    }
    entry_points = {"aionn", "aionn.drivers.registry", "aionn.ops"}
    unused = ["aionn/dead.py", "aionn/ops/forgotten.py"]
    pair = ["aionn/testing/pair.py", "aionn/testing/pair_run.py"]
    assert unused_modules(sources, entry_points, "Use `aionn.testing.clock.run`.") == [*unused, *pair]
    assert unused_modules(sources, entry_points, "`aionn.testing.clock`, `aionn.testing.pair:f`.") == unused


def test_place_rule_catches():
    text = "fine\nsee /" + "work/x and /" + "root/y\nframework/x\n"
    assert place_breaches({"a.md": text}) == ["a.md:2: /" + "work/", "a.md:2: /" + "root/"]
