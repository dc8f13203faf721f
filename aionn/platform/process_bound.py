"""Objects that belong to the process that made them.

Owns the refusal to copy and pickle them. Refuses to own the objects.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

__all__ = ["InThisProcess"]


class InThisProcess:
    """An object with the event loop, devices, tasks or memory of the process that made it.

    Attributes:
        INSTEAD: The end of the message: the way to have such an object, or its contents, elsewhere.
    """

    __slots__ = ()

    INSTEAD: ClassVar[str] = "open a runtime in the other process, or share a device by aionn serve"

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied, or pickled as an argument of a process: the copy would have no event loop and no devices."""
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled; {self.INSTEAD}")
