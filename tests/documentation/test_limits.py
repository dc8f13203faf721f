"""The tables of limits in docs/security.md have the values, the options and the messages of the code."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest

from aionn.cli.commands.serve import serve
from aionn.drivers import reference
from aionn.drivers.kit import gate
from aionn.drivers.kit.caching import FILE_BYTES_MAX
from aionn.drivers.kit.engines import device as engines
from aionn.drivers.onnx_reference import driver as onnx_reference
from aionn.fleet import messages as network
from aionn.fleet.node import session
from aionn.observability import scraping
from aionn.oip import door, grpc_server, models, rest_app, rest_server
from aionn.scheduler import ledger, planned_queue
from aionn.service.client.connection import CONNECT_S_MAX
from aionn.service.host import bursts, listening, newcomers, reservations
from aionn.service.host.process import SHARED_QUOTAS
from aionn.service.wire import channel, large, load, protocol, sizes
from aionn.watch import app, process
from tests.documentation.pages import ROOT
from tests.documentation.test_troubleshooting import GAP, texts_of
from tests.test_tidy import PACKAGES, read

MIB = 1 << 20

LETTERS_MIN = 12
"""Letters that a message and a text of the code have in common: fewer are found by chance."""

RAISING = (
    "aionn/service/host/",
    "aionn/service/wire/",
    "aionn/service/client/connection.py",
    "aionn/fleet/node/",
    "aionn/oip/",
    "aionn/scheduler/ledger.py",
    "aionn/scheduler/shared_slots.py",
    "aionn/drivers/kit/memories.py",
)
"""Files and folders whose messages are in the tables."""

FOREIGN = "Concurrent RPC limit exceeded!"
"""A message of grpcio."""

CODE_TEXTS_WITH_VALUES = re.compile(r"%(?:s|d|g|\.\w+)")


def tables() -> dict[str, list[list[str]]]:
    """The rows of each table of the section, by its heading, without their heads."""
    page = (ROOT / "docs" / "security.md").read_text()
    section = page.partition("## Limits of a served device\n")[2].partition("\n## ")[0]
    found = {}
    for part in section.split("\n### ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
        found[part.partition("\n")[0]] = rows[2:]
    return found


ROWS = {row[0]: row for rows in tables().values() for row in rows}


def default(option: str) -> Any:
    return inspect.signature(serve).parameters[option.removeprefix("--").replace("-", "_")].default


OPTIONS = sorted(
    {option for row in ROWS.values() for cell in row for option in re.findall(r"`(--[a-z-]+)`", cell)}
)


@pytest.mark.parametrize("option", OPTIONS)
def test_option_of_a_limit_exists(option: str) -> None:
    assert default(option) is not inspect.Parameter.empty


@pytest.mark.parametrize("name", SHARED_QUOTAS.__struct_fields__)
def test_each_quota_is_in_the_table_with_its_option(name: str) -> None:
    row = ROWS[f"`{name.replace('_', ' ')}`"]
    value = getattr(SHARED_QUOTAS, name)
    assert row[2] == (f"{value // MIB} MiB" if name.endswith("bytes") else str(value))
    if row[3].startswith("`"):
        found = default(row[3].strip("`"))
        assert found == (value // MIB if name.endswith("bytes") else value)
    else:
        assert row[3].startswith("fixed")


BY_OPTION = [
    row
    for rows in tables().values()
    for row in rows
    if re.fullmatch(r"[\d.]+(?: s)?", row[1]) and row[2].startswith("`")
]


@pytest.mark.parametrize("row", BY_OPTION, ids=lambda row: row[0])
def test_default_of_an_option_is_that_of_the_command(row: list[str]) -> None:
    assert float(row[1].removesuffix(" s")) == default(row[2].strip("`"))


FIXED: dict[str, tuple[float, ...]] = {
    "newcomers that wait": (
        newcomers.REFUSALS_MAX,
        newcomers.REFUSALS_PER_USER_MAX,
        newcomers.REFUSALS_PER_PROCESS_MAX,
        newcomers.FREED_S_MAX,
    ),
    "connections that are not accepted yet": (listening.BACKLOG, CONNECT_S_MAX),
    "descriptors on their way": (load.HELD_MAX,),
    "executions that wait": (planned_queue.WAITING_MAX,),
    "preempted executions": (gate.SUSPENDED_MAX,),
    "executions that have given": (gate.TURNS_MAX,),
    "bytes of a model": (large.MESSAGE_BYTES_MAX / MIB,),
    "operands and operations": (large.MODEL_ELEMENTS_MAX, large.SUBGRAPHS_MAX),
    "inputs, outputs": (sizes.ARGUMENTS_MAX,),
    "memories and fences": (protocol.DESCRIPTORS_WITH_MESSAGE_MAX,),
    "fences that": (sizes.FENCES_MAX,),
    "queue of a burst": (bursts.QUEUE_BYTES_MAX / MIB, bursts.QUEUE_BYTES_MAX),
    "calls in progress": (
        load.CALLS_AT_ONCE_MAX,
        load.INLINE_BYTES_AT_ONCE_MAX / MIB,
        load.BYTES_AT_ONCE_MAX / MIB,
    ),
    "answers that": (load.OWED_BYTES_MAX / MIB,),
    "a file of": (FILE_BYTES_MAX / (1 << 30),),
    "reservations of one process": (reservations.OF_PROCESS_MAX,),
    "reservations of one user": (reservations.OF_USER_MAX,),
    "reservations in all": (ledger.RESERVATIONS_MAX,),
    "time without a frame": (ledger.SILENCE_NS / 1e9,),
    "calls of one client": (session.CALLS_MAX,),
    "data connections of one client": (session.DATA_CONNECTIONS_MAX,),
    "values of one execution": (network.DATA_BYTES_MAX / MIB, network.DATA_BYTES_MAX),
    "a model, or": (network.MODEL_BYTES_MAX / MIB,),
    "silence of a client": (session.SILENT_S_MAX,),
    "models": (models.MODELS_MAX,),
    "models with a burst": (SHARED_QUOTAS.bursts,),
    "requests under way": (models.EXECUTIONS_MAX,),
    "calls of gRPC": (grpc_server.CALLS_MAX,),
    "calls of one connection": (grpc_server.CALLS_PER_CONNECTION_MAX,),
    "connections of gRPC": (grpc_server.CONNECTIONS_MAX,),
    "streams of gRPC": (grpc_server.STREAMS_MAX,),
    "requests of a stream": (grpc_server.STREAM_REQUESTS_MAX,),
    "silence on a stream": (grpc_server.STREAM_SILENT_S_MAX,),
    "an answer of a stream": (grpc_server.STREAM_UNREAD_S_MAX,),
    "an idle connection of gRPC": (
        grpc_server.IDLE_MS_MAX / 1e3,
        grpc_server.HANDSHAKE_MS_MAX / 1e3,
        grpc_server.PONG_MS_MAX / 1e3,
    ),
    "connections of REST": (rest_server.CONNECTIONS_MAX,),
    "headers of a request over REST": (rest_server.HEADERS_S_MAX, rest_server.HEADERS_BYTES_MAX / 1024),
    "body of a request over REST": (rest_app.BODY_S_MAX,),
    "bytes of a request": (models.MESSAGE_BYTES_MAX / MIB,),
    "an answer of REST": (rest_server.UNREAD_S_MAX,),
    "tabs of the watch page": (app.TABS_MAX,),
    "connections to the watch page": (process.CONNECTIONS_MAX,),
    "a request to the watch page": (process.REQUEST_S_MAX, process.HEADERS_BYTES_MAX / 1024),
    "an answer of the watch page": (process.UNREAD_S_MAX, app.SEND_S_MAX),
    "a tab that asks": (app.SILENT_S_MAX,),
    "connections to the metrics": (scraping.CONNECTIONS_MAX,),
    "a request to the metrics": (scraping.REQUEST_S_MAX, scraping.REQUEST_BYTES_MAX / 1024),
}
"""The beginning of a row, and the numbers that it contains."""


@pytest.mark.parametrize("name", FIXED)
def test_fixed_limit_is_that_of_the_code(name: str) -> None:
    row = ROWS.get(name) or next(row for first, row in ROWS.items() if first.startswith(name))
    written = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", " ".join(row[1:]))}
    assert set(FIXED[name]) <= written


def test_limits_that_are_ratios_or_stated_in_words() -> None:
    assert {reference.MEMORY_BYTES_MAX, onnx_reference.MEMORY_BYTES_MAX, engines.MEMORY_BYTES_MAX} == {
        1 << 30
    }
    assert "1 GiB" in ROWS["device memories"][1]
    assert load.HELD_PART == 4 and "a quarter" in ROWS["descriptors on their way or being closed"][1]
    assert channel.COPIES_AT_ONCE_MAX == 2 and "two" in ROWS["copies of large messages"][1]
    kinds = {sizes.PLAIN_BYTES_MAX, *sizes._INLINE_BYTES_MAX.values(), sizes._LARGE_BYTES_MAX["PrepareModel"]}
    assert {f"{size >> 10} KiB" if size < MIB else f"{size // MIB} MiB" for size in kinds} == set(
        re.findall(r"\d+ [KM]iB", ROWS["bytes of a message"][1])
    )
    assert door.EXECUTIONS_MAX is models.EXECUTIONS_MAX


# --- Messages -----------------------------------------------------------------------------------------------------------------


def messages() -> list[str]:
    """The messages of the tables: quoted texts of several words."""
    found = {text for row in ROWS.values() for cell in row for text in re.findall(r"`([^`]+)`", cell)}
    found.add("service, WORDS: this client may have ..., has ..., asked for ... more")
    words = {row[0].strip("`") for row in tables()["Objects of one client"]}
    return sorted(text for text in found - words - {FOREIGN} if len(text.split()) > 2)


@functools.cache
def patterns() -> tuple[re.Pattern[str], ...]:
    """Each text of the code that has several words, with any text in the place of its values."""
    found = []
    for path, source in read(PACKAGES, (".py",)).items():
        if path.startswith(RAISING):
            for text in texts_of(path, source):
                parts = CODE_TEXTS_WITH_VALUES.sub(GAP, text).split(GAP)
                if sum(map(len, parts)) >= LETTERS_MIN:
                    found.append(re.compile(".*".join(map(re.escape, parts))))
    return tuple(found)


@pytest.mark.parametrize("message", messages())
def test_message_of_a_limit_is_a_text_of_the_code(message: str) -> None:
    assert any(pattern.fullmatch(message) for pattern in patterns())


def test_message_that_does_not_exist_is_noticed() -> None:
    assert len(messages()) > 30
    assert not any(pattern.fullmatch("the device serves 256 horses already") for pattern in patterns())
