"""The lowered model of the last question, for a preparation of the same model that follows it.

A runtime asks a device whether it supports a model, and then has it prepared. Both validate and lower the model, which takes longer
than the engine's own work for a network of usual size.

Owns when two models are the same: they come from the same client, their structures are equal, and their constants are the same
bytes of the same files, which are sealed against writing.

Invariants:
1. A record holds no memory of a client but sealed constants, and was made of the model as it was when it was lowered. A client
   that mapped its constants before the seal, and changes them all the same, changes the results of its own model alone.
2. One record is kept at a time, for no longer than ``KEPT_NS``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from aionn.hal import Model
from aionn.hal.callers import client_of_call

__all__ = ["KEPT_NS", "Asked", "asked_about"]

KEPT_NS = 2_000_000_000
"""A runtime asks its other devices in between, and may have to start their processes; then it prepares."""


class Asked(msgspec.Struct, frozen=True):
    """A lowered model, and the model that it was made of.

    Attributes:
        client: Whose call it was.
        structure: The model without its pools.
        files: Its pools.
        lowered: The driver's form of it; every operation is supported.
    """

    client: Hashable
    structure: Model
    files: tuple[tuple[object, ...], ...]
    lowered: Any

    def is_for(self, model: Model) -> bool:
        """Whether the calling client's model is the same one. The model need not be valid."""
        try:
            return (
                self.client == client_of_call.get()
                and self.files == _files(model)
                and self.structure == _without_pools(model)
            )
        except (AttributeError, TypeError, ValueError):
            return False  # A model whose fields have other types.


def asked_about(model: Model, lowered: Any) -> Asked | None:
    """The record of a model that was validated and lowered; None if its constants could be changed."""
    files = _files(model)
    return None if files is None else Asked(client_of_call.get(), _without_pools(model), files, lowered)


def _files(model: Model) -> tuple[tuple[object, ...], ...] | None:
    if not all(pool.is_unchanging for pool in model.pools):
        return None
    return tuple((pool.file, pool.offset, pool.size_bytes) for pool in model.pools)


def _without_pools(model: Model) -> Model:
    return msgspec.structs.replace(model, pools=())
