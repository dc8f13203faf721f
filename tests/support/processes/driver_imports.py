"""Everything that the processes of our own drivers import, and the caches that each of them would fill first.

For the process that they are forked from: importing LiteRT takes ten times as long as serving a device for a moment.
"""

from __future__ import annotations

import contextlib
import importlib
import io

from aionn.drivers.registry import built_in_info
from aionn.errors import DeviceUnavailable
from aionn.service.entry import main
from aionn.validation import check_device_info

ENGINES = {"litert-cpu": "litert", "ort-cpu": "onnxruntime", "openvino-cpu": "openvino"}
"""The packages below ``aionn.drivers`` whose module ``engine`` imports a library, which may not be installed."""


def fill_caches() -> None:
    """Reads the command line of a driver process, and checks the DeviceInfo of each driver, as such a process does."""
    for name in (*ENGINES, "onnx-reference", "reference"):
        with contextlib.suppress(DeviceUnavailable, ImportError):
            info = built_in_info(name, name)
            assert info is not None, name
            check_device_info(info)
            if name in ENGINES:
                importlib.import_module(f"aionn.drivers.{ENGINES[name]}.engine")
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(["--help"])


fill_caches()
