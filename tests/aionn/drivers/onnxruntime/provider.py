"""Whether an execution provider of ONNX Runtime can be used on this machine."""

from __future__ import annotations

import numpy as np

from aionn.drivers.onnxruntime.providers import provider_named
from aionn.errors import Error
from aionn.models.onnx.encoding import encode_model, node
from aionn.models.onnx.schema import DataType, GraphProto, ModelProto, OpsetImport, ValueInfo


def why_not(driver: str) -> str | None:
    """Why sessions of a driver's provider cannot be made; None if they can. What the provider opens stays in this process."""
    from aionn.drivers.kit.engines.support import Unsupported
    from aionn.drivers.onnxruntime.engine import Loading

    kinds = (ValueInfo("x", DataType.FLOAT, (1,)), ValueInfo("y", DataType.FLOAT, (1,)))
    graph = GraphProto(name="neg", nodes=(node("Neg", ["x"], ["y"]),), inputs=kinds[:1], outputs=kinds[1:])
    file = encode_model(ModelProto(ir_version=8, opsets=(OpsetImport("", 17),), graph=graph))
    try:
        session = Loading(provider_named(driver), 1).make(file)
    except (Error, Unsupported) as e:
        return str(e)
    session.run(None, {"x": np.ones(1, np.float32)})
    return None
