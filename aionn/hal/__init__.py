"""The HAL's vocabulary: data types with the spec's names and numbers, and the driver contract. No policy.

Everything that crosses the boundary between runtime and driver is a type of this package.
"""

from __future__ import annotations

from aionn.hal.capabilities import *  # noqa: F403
from aionn.hal.device import *  # noqa: F403
from aionn.hal.launch import *  # noqa: F403
from aionn.hal.memory import *  # noqa: F403
from aionn.hal.model import *  # noqa: F403
from aionn.hal.operand import *  # noqa: F403
from aionn.hal.operation import *  # noqa: F403
from aionn.hal.qos import *  # noqa: F403
from aionn.hal.request import *  # noqa: F403
from aionn.hal.reusable import *  # noqa: F403
