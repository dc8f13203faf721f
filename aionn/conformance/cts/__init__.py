"""The public conformance data: single tests with their inputs and expected outputs, and the ways to run them on a device."""

from __future__ import annotations

from aionn.conformance.cts.data import *  # noqa: F403
