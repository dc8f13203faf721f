"""What messages show of an address."""

import traceback

import pytest

from aionn.errors import InvalidArgument
from aionn.media.network_streams.addresses import checked_address, masked, without_credentials
from aionn.media.network_streams.messages import Start, decode_start, encode_start

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rtsp://cam:554/live/1", "rtsp://cam:554/live/1"),
        (f"rtsp://admin:{SECRET}@cam:554/live/1", "rtsp://cam:554/live/1"),
        (f"rtsp://admin:p@{SECRET}@cam/1", "rtsp://cam/1"),
        (f"admin:{SECRET}@cam:554/1", "cam:554/1"),
        # Characters of a password that are not encoded end the authority for every parser.
        (f"rtsp://admin:{SECRET}#5@cam/1", "rtsp://***@cam/1"),
        (f"rtsp://admin:{SECRET}?5@cam/1", "rtsp://***@cam/1"),
        (f"rtsp://admin:{SECRET}/5@cam/1", "rtsp://***@cam/1"),
        (f"rtsp://admin:5/{SECRET}@cam/1", "rtsp://***@cam/1"),
        (f"rtsp://admin:p@{SECRET}/5@cam/1", "rtsp://***@cam/1"),
        # Parameters, in a query, a fragment or the path itself.
        (f"http://cam/mjpeg?key={SECRET}", "http://cam/mjpeg"),
        (f"http://cam/mjpeg#{SECRET}", "http://cam/mjpeg"),
        (f"http://cam/mjpeg;key={SECRET}", "http://cam/mjpeg"),
        (f"rtsp://cam/user=admin&password={SECRET}&channel=1", "rtsp://cam/user"),
    ],
)
def test_no_secret_of_an_address_is_shown(url: str, shown: str) -> None:
    assert masked(url) == shown
    try:
        checked_address(url, "here")
    except InvalidArgument as e:
        # Of parsers too: urllib's own error names the part that it takes for a port.
        assert SECRET not in "".join(traceback.format_exception(e))


def test_message_of_a_library_repeats_no_secret_of_an_address() -> None:
    for url in (
        f"rtsp://{SECRET}:{SECRET}@cam/1?key={SECRET}",
        f"rtsp://cam/user=admin&password={SECRET}&channel=1",
    ):
        told = without_credentials(f"{url}: refused; {url.partition('cam')[2]}: 401", url)
        assert SECRET not in told and "refused" in told


def test_short_secret_changes_no_word_of_a_message() -> None:
    url = "rtsp://u:on@camera/main"
    assert (
        without_credentials("ConnectionRefusedError: no connection for u:on (u, on)", url)
        == "ConnectionRefusedError: no connection for ***:*** (***, ***)"
    )
    # A long one is hidden wherever it is.
    assert "password" not in without_credentials("xpassword1", "rtsp://u:password@camera/main")


def test_first_message_to_the_decoder_is_shown_without_secrets() -> None:
    """Debuggers, and reports of failures with the values of variables, show it."""
    start = Start(
        url=f"rtsp://admin:{SECRET}@cam/1",
        kind="video",
        size=None,
        sample_rate_hz=16_000,
        options={"headers": f"Authorization: {SECRET}"},
        format=None,
        open_s_max=1.0,
        read_s_max=1.0,
        slots=4,
        drops=True,
        memory_bytes_max=1,
    )
    assert "rtsp://cam/1" in repr(start) and SECRET not in repr(start)
    assert decode_start(encode_start(start)) == start
