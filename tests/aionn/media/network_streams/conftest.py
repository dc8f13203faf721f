"""No process of a network source may be left, and its time-outs are short here."""

import pytest

pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")


@pytest.fixture
def impatient(monkeypatch):
    """A source is lost after tenths of a second."""
    monkeypatch.setattr("aionn.media.live.source.SILENCE_S_MIN", 0.3)
    monkeypatch.setattr("aionn.media.live.source.SILENCE_S_DEFAULT", 0.3)
    monkeypatch.setattr("aionn.media.live.source.FIRST_ITEM_S_MAX", 3.0)
