"""Encryption and identity: pins, authorities, certificates of clients."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from aionn.errors import DeviceUnavailable, InvalidArgument, ResourceExhausted
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.fleet.tls import client_context, node_context
from aionn.fleet.wire import words_of_loss
from tests.aionn.fleet.conftest import Served, serving
from tests.aionn.service.sums import Sum, sum_model

pytestmark = pytest.mark.forked("any")

FOLDER = Path(__file__).parent / "certificates"
NODE, CLIENT, STRANGER = (str(FOLDER / f"{name}.pem") for name in ("node", "client", "stranger"))


def pin_of(path: str) -> str:
    text = Path(path).read_text()
    return hashlib.sha256(
        ssl.PEM_cert_to_DER_cert(
            text[text.index("-----BEGIN CERT") :].split("-----BEGIN EC")[0].split("-----BEGIN PRIV")[0]
        )
    ).hexdigest()


@pytest.fixture(scope="module")
def mutual() -> Iterator[Served]:
    """A node that demands certificates."""
    with serving("--tls-certificate", NODE, "--tls-clients", CLIENT) as served:
        yield served


async def outcome(address: str) -> str:
    """Whether an execution succeeds at an address, or why it does not."""
    device = NodeDevice(parse_node(address))
    try:
        prepared = await device.prepare_model(sum_model(50_000))
        for _ in range(3):
            frame = Sum(50_000)
            await prepared.execute_synchronously(frame.request)
            assert frame.is_right
    except DeviceUnavailable as e:
        return str(e)
    finally:
        await device.aclose()
    return "right"


async def test_client_with_a_certificate_is_served(mutual: Served) -> None:
    assert mutual.address.startswith("tls://")
    place = f"{mutual.address}?silence_ms=30000&certificate={CLIENT}"
    assert await outcome(f"{place}&pin={pin_of(NODE)}") == "right"
    assert await outcome(f"{place}&ca={NODE}") == "right"


async def test_wrong_certificates_are_refused_in_words(mutual: Served) -> None:
    place, pin = mutual.address, pin_of(NODE)
    assert "expected the certificate" in await outcome(f"{place}?certificate={CLIENT}&pin={pin_of(STRANGER)}")
    assert "its certificate is not accepted" in await outcome(f"{place}?certificate={CLIENT}")
    assert "its certificate is not accepted" in await outcome(f"{place}?certificate={CLIENT}&ca={STRANGER}")
    assert "may not have this client's certificate" in await outcome(
        f"{place}?pin={pin}&certificate={STRANGER}"
    )
    assert "add certificate=FILE to the address" in await outcome(f"{place}?pin={pin}")


@pytest.mark.parametrize("error", [None, ConnectionResetError(104, "reset"), BrokenPipeError(32, "pipe")])
def test_connection_that_the_other_end_closed_is_named_as_such(error: OSError | None) -> None:
    assert words_of_loss(error) == "the other end closed the connection"
    assert "No route" in words_of_loss(OSError(113, "No route to host"))


async def test_client_without_tls_is_told_what_to_write(mutual: Served) -> None:
    told = await outcome(mutual.address.replace("tls://", ""))
    assert "tls://" in told


def test_certificate_without_its_key_is_named(tmp_path: Path) -> None:
    path, text = tmp_path / "node.crt", Path(NODE).read_text()
    begin, end = text.index("-----BEGIN CERT"), text.index("-----END CERTIFICATE-----")
    path.write_text(text[begin:end] + "-----END CERTIFICATE-----\n")
    with pytest.raises(InvalidArgument, match=r"node\.crt\): expected PEM: .* private key"):
        node_context(str(path), "", "")


@pytest.mark.parametrize("text", ["", "no certificate"])
def test_files_that_hold_no_certificate_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.pem"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"cannot be used \(.*a\.pem\): "):
        node_context(str(path), "", "")
    with pytest.raises(InvalidArgument, match="cannot be used"):
        client_context(parse_node(f"tls://edge2:1?ca={path}"))
    with pytest.raises(InvalidArgument, match=r"missing\.pem\): No such file"):
        node_context(NODE, "", str(tmp_path / "missing.pem"))


async def test_quotas_of_the_command_line_count_by_the_name_of_the_certificate() -> None:
    with serving(
        "--tls-certificate", NODE, "--tls-clients", CLIENT, "--client-quota", "client:clients=1,models=1"
    ) as limited:
        place = f"{limited.address}?silence_ms=30000&certificate={CLIENT}&pin={pin_of(NODE)}"
        device = NodeDevice(parse_node(place))
        prepared = await device.prepare_model(sum_model())
        with pytest.raises(ResourceExhausted, match="the clients of client may have 1, have 1"):
            await device.prepare_model(sum_model())
        told = await outcome(place)
        assert "clients: the clients of client may have 1" in told and "--client-quota" in told
        await prepared.aclose()
        await (await device.prepare_model(sum_model())).aclose()
        await device.aclose()
