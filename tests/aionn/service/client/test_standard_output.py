"""A driver process has no descriptor of the application's: what it prints is logged, and what it sets is its own."""

from __future__ import annotations

import fcntl
import logging
import os
import textwrap
from pathlib import Path

import anyio
import pytest

from aionn.service.client.device import RemoteDevice

PRINTING = """
    import fcntl, os, sys
    from aionn.drivers.reference import ReferenceDevice

    def device(name):
        fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_APPEND)
        print("printed")
        return ReferenceDevice(name)
"""


async def test_what_a_driver_prints_is_logged_and_flags_it_sets_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "printing_driver.py").write_text(textwrap.dedent(PRINTING))
    monkeypatch.syspath_prepend(str(tmp_path))
    caplog.set_level(logging.INFO, logger="aionn.driver")
    before = fcntl.fcntl(1, fcntl.F_GETFL)
    try:
        async with anyio.create_task_group() as tasks:
            device = RemoteDevice("printing_driver:device", "printing", tasks)
            await device.connect()
            after = fcntl.fcntl(1, fcntl.F_GETFL)
            await device.aclose()
    finally:
        fcntl.fcntl(1, fcntl.F_SETFL, before)
    assert not after & (os.O_NONBLOCK | os.O_APPEND) & ~before
    assert "printed" in caplog.messages
