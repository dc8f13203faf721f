"""``aionn serve --listen``: the node beside a served device."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import msgspec

from aionn.cli.serving.children import ends_with_server
from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.fleet.addresses import ListenAddress, parse_listen
from aionn.fleet.node.process import NodeSettings, check_open_to, listening, running
from aionn.fleet.node.quotas import quotas_of
from aionn.service.host.admission import ClientLimits

__all__ = ["Network", "network_of", "serving_network", "socket_of"]


class Network(msgspec.Struct, frozen=True):
    """The options of a command line that belong to the network.

    Attributes:
        address: Where to listen.
        settings: The settings of the server; the path of the socket is added when it is known.
    """

    address: ListenAddress
    settings: NodeSettings


def network_of(
    listen: str | None,
    name: str | None,
    files: tuple[Path | None, Path | None, Path | None],
    quotas: Sequence[str],
    limits: ClientLimits,
    *,
    any_client: bool,
) -> Network | None:
    """Checks the options of a node; None where it does not listen.

    Args:
        listen: HOST:PORT.
        name: Of the node; None for the host's.
        files: Its certificate, the key of that, and the certificates of clients.
        quotas: See ``quotas_of``.
        limits: Of connections.
        any_client: Whether clients of other machines need no certificate.

    Raises:
        InvalidArgument: They make no sense together, or a file cannot be used.
    """
    certificate, key, clients = files
    given = {
        "--node-name": name,
        "--tls-certificate": certificate,
        "--tls-key": key,
        "--tls-clients": clients,
        "--any-client": any_client or None,
        "--client-quota": quotas or None,
    }
    if listen is None:
        if named := [option for option, value in given.items() if value is not None]:
            raise InvalidArgument(f"{named[0]} goes with --listen")
        return None
    shown, own_key, known = ("" if path is None else os.fspath(path) for path in (certificate, key, clients))
    settings = NodeSettings(
        name or socket.gethostname(), "", shown, own_key, known, limits, quotas_of(quotas)
    )
    address = parse_listen(listen)
    check_open_to(address, settings, any_client=any_client)
    return Network(address, settings)


@contextmanager
def socket_of(path: Path | None) -> Iterator[Path]:
    """The path of the device's socket: the user's, or one in a private folder that is removed at the end."""
    if path is not None:
        yield path
        return
    folder = tempfile.mkdtemp(prefix="aionn-node-")  # Mode 700.
    try:
        yield Path(folder) / "device"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def serving_network(network: Network | None, path: Path) -> AsyncIterator[str]:
    """Serves clients of the network while inside; gives the address, or an empty text where there is no network.

    Raises:
        DeviceUnavailable: It cannot listen, or the node's process has ended.
    """
    if network is None:
        yield ""
        return
    with ExitStack() as until_its_end, listening(network.address) as listener:
        host, port = listener.getsockname()[:2]
        settings = msgspec.structs.replace(network.settings, socket=os.fspath(path))
        async with running(listener, settings) as process, anyio.create_task_group() as tasks:
            until_its_end.enter_context(ends_with_server(process))
            tasks.start_soon(_watch, process)
            scheme = "tls://" if settings.certificate else ""
            yield f"{scheme}{f'[{host}]' if ':' in host else host}:{port}"
            tasks.cancel_scope.cancel()


async def _watch(process: subprocess.Popen[bytes]) -> None:
    descriptor = os.pidfd_open(process.pid)
    try:
        await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    raise DeviceUnavailable(
        f"the node's process (pid {process.pid}) has ended: clients of the network are not served"
    )
