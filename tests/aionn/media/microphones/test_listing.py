"""The microphones of a sound server, by a control program that is a real subprocess."""

import asyncio
import stat
import sys
import time

import pytest

from aionn.media import MicrophoneInfo, SourceUnavailable, list_microphones

LISTED = (
    "1\\tsink.monitor\\tPipeWire\\ts16le 2ch 48000Hz\\tSUSPENDED\\n"
    "2\\talsa_input.usb-C920\\tPipeWire\\ts16le 1ch 32000Hz\\tRUNNING\\n"
    "\\n"
    "warning: no columns\\n"
)


@pytest.fixture
def pactl(tmp_path, monkeypatch):
    """Replaces the control program of this machine by one that runs Python; without a body there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(body):
        program = tmp_path / "pactl"
        program.write_text(f"#!{sys.executable} -IS\nimport sys, time\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return make


def test_microphones_are_listed_by_the_names_that_a_source_takes(really, pactl):
    pactl(f"assert sys.argv[1:] == ['list', 'short', 'sources']\nsys.stdout.write('{LISTED}')")
    assert really(list_microphones) == [
        MicrophoneInfo("sink.monitor", "s16le 2ch 48000Hz", "SUSPENDED", True),
        MicrophoneInfo("alsa_input.usb-C920", "s16le 1ch 32000Hz", "RUNNING", False),
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "no `pactl`: install a package such as pulseaudio-utils"),
        (
            "sys.exit('Connection failure: Connection refused')",
            "Connection refused; is a sound server running",
        ),
        ("sys.exit(1)", "pactl failed"),
        ("time.sleep(100)", r"within 0\.3 s, got none"),
    ],
    ids=["missing", "no server", "silent failure", "hangs"],
)
def test_list_that_cannot_be_made_is_an_error_with_the_reason(really, pactl, monkeypatch, body, words):
    monkeypatch.setattr("aionn.media.microphones.listing.LIST_S_MAX", 0.3)
    if body is not None:
        if "Connection" in body or body == "sys.exit(1)":
            monkeypatch.setattr("aionn.media.microphones.listing.LIST_S_MAX", 60.0)
        pactl(body)

    async def run():
        started_s = time.monotonic()
        with pytest.raises(SourceUnavailable, match=words):
            await list_microphones()
        assert time.monotonic() - started_s < 40

    really(run)


def test_list_that_is_cancelled_twice_leaves_no_process(really, pactl):
    pactl("time.sleep(0.5)")

    async def run():
        task = asyncio.create_task(list_microphones())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    really(run)
