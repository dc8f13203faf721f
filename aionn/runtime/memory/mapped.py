"""Base class of the application's memory that driver processes also map.

Owns its end, and a copy of its values. ``own`` and ``images`` define the meaning of the bytes, and their arguments in a request.

Invariant: the mapping lives as long as the array or a view of it is referenced; closing gives back the descriptor alone.

Source: memory objects of the NN HAL's runtime (``ANeuralNetworksMemory``).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import HardwareBufferDesc, Memory, MemoryKind
from aionn.platform.process_bound import InThisProcess

__all__ = ["MappedMemory", "given_memory"]

Array = npt.NDArray[Any]


def given_memory(
    fd: int, kind: MemoryKind, *, writable: bool, image: HardwareBufferDesc | None = None
) -> Memory:
    """The memory of a descriptor that the application gives.

    Raises:
        InvalidArgument: It cannot be used so: for the application a descriptor that the kernel does not map is a wrong argument.
        ResourceExhausted: No descriptor or no address space is left.
    """
    try:
        return Memory.from_fd(fd, kind=kind, writable=writable, image=image)
    except GeneralFailure as e:
        remedy = (
            "; one that is read-only, or sealed against writing, needs writable=False" if writable else ""
        )
        raise InvalidArgument(f"{e}{remedy}") from e


class MappedMemory(InThisProcess):
    """Memory with an array in it. Close it, or use it with ``with``.

    Args:
        memory: Closed with this object.
        array: A view of it.

    Attributes:
        memory: The memory itself.
        array: The values; the next execution reads the values written here.
    """

    INSTEAD = "copy its array, or make one in the other process"

    def __init__(self, memory: Memory, array: Array) -> None:
        self.memory = memory
        self.array = array

    def __repr__(self) -> str:
        state = "closed" if self.memory.is_closed else "open"
        return f"<{type(self).__name__} {self.array.dtype} {list(self.array.shape)}, {state}>"

    async def read(self) -> Array:
        """A copy of the values, without gaps."""
        return self.array.copy()

    def close(self) -> None:
        """Closes the descriptor; ``array`` stays valid. Idempotent."""
        self.memory.close()

    async def aclose(self) -> None:
        """As ``close``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
