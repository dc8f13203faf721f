"""The memory that one client may take at a node.

Owns the count. Pure.
"""

from __future__ import annotations

from aionn.errors import ResourceExhausted

__all__ = ["CLIENT_BYTES_MAX", "Budget"]

CLIENT_BYTES_MAX = 1 << 30
"""Values and models of one client together, as ``--memory-mib`` has for a client of the socket by default."""


class Budget:
    """The memory of one client.

    Args:
        bytes_max: Memory that it may take.

    Attributes:
        taken_bytes: Memory that it has.
    """

    __slots__ = ("_bytes_max", "taken_bytes")

    def __init__(self, bytes_max: int = CLIENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Counts memory before it is allocated.

        Raises:
            ResourceExhausted: It would be too much.
        """
        if self.taken_bytes + size_bytes > self._bytes_max:
            raise ResourceExhausted(
                f"node: {size_bytes} bytes are more than what is left of the {self._bytes_max} bytes of one client",
                transient=True,
            )
        self.taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Undoes ``take``."""
        self.taken_bytes -= size_bytes
        assert self.taken_bytes >= 0, "more is given back than was taken"
