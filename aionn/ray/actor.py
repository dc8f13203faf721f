"""The actor of a node, as Ray runs it: a shell around ``NodeProcess``, whose calls are for control alone."""

from __future__ import annotations

import asyncio
from typing import Any

from aionn.ray.process import NodeProcess
from aionn.ray.settings import NodeSettings

__all__ = ["NodeActor"]


class NodeActor:
    """One node. Ray never starts it again: applications notice the loss of its node themselves, and a restart by Ray takes seconds.

    Args:
        settings: Of the node.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._process = NodeProcess(settings)
        self._task: asyncio.Task[None] | None = None

    async def address(self) -> str:
        """The address for clients; starts the process when it is called first. Raises as ``NodeProcess.address``."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._process.run(), name="aionn-node")
        return await self._process.address()

    async def figures(self) -> dict[str, Any]:
        """State, starts and place."""
        return self._process.figures()

    async def drain(self) -> None:
        """Ends the node in order."""
        if self._task is not None:
            await self._process.drain()
