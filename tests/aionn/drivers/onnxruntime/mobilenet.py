"""A network with the layers of MobileNetV2 and numbers that a seed gives, as an ONNX file: 3.5 million weights, 0.3 billion
multiplications for each image of 224 x 224.
"""

from __future__ import annotations

import numpy as np

from aionn.models.onnx.encoding import encode_model, node, tensor
from aionn.models.onnx.schema import (
    DataType,
    GraphProto,
    ModelProto,
    NodeProto,
    OpsetImport,
    TensorProto,
    ValueInfo,
)

BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Factor by which the channels are widened, channels of the results, number of blocks, stride of the first one."""

SIDE, CLASSES = 224, 1000

INPUT_SHAPE = (1, 3, SIDE, SIDE)


class _Layers:
    def __init__(self, seed: int) -> None:
        self._draws = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = [
            tensor("least", np.float32(0)),
            tensor("most", np.float32(6)),
        ]

    def _add(self, kind: str, *inputs: str, **attributes: object) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(node(kind, list(inputs), [output], **attributes))
        return output

    def _constant(self, *shape: int, spread: float) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(tensor(name, (self._draws.standard_normal(shape) * spread).astype(np.float32)))
        return name

    def convolution(
        self, x: str, channels: int, result: int, *, side: int = 1, stride: int = 1, is_bounded: bool = True
    ) -> str:
        """A convolution; one for each channel where the window is larger than a point and the channels stay."""
        group = channels if side > 1 and channels == result else 1
        window = (result, channels // group, side, side)
        weights = self._constant(*window, spread=(2 / np.prod(window[1:])) ** 0.5)
        pads = [side // 2] * 4
        y = self._add(
            "Conv",
            x,
            weights,
            self._constant(result, spread=0.1),
            group=group,
            strides=[stride] * 2,
            pads=pads,
        )
        return self._add("Clip", y, "least", "most") if is_bounded else y

    def block(self, x: str, channels: int, result: int, factor: int, stride: int) -> str:
        wide = channels * factor
        y = x if factor == 1 else self.convolution(x, channels, wide)
        y = self.convolution(y, wide, wide, side=3, stride=stride)
        y = self.convolution(y, wide, result, is_bounded=False)
        return self._add("Add", x, y) if stride == 1 and channels == result else y

    def head(self, x: str, channels: int) -> None:
        pooled = self._add("Flatten", self._add("GlobalAveragePool", x))
        weights = self._constant(channels, CLASSES, spread=channels**-0.5)
        scores = self._add("Gemm", pooled, weights, self._constant(CLASSES, spread=0.1))
        self.nodes.append(node("Softmax", [scores], ["scores"]))


def mobilenet_v2(seed: int = 0) -> bytes:
    """The file. Its input ``image`` is float32 ``[1, 3, 224, 224]``, its output ``scores`` float32 ``[1, 1000]``."""
    layers = _Layers(seed)
    x, channels = layers.convolution("image", 3, 32, side=3, stride=2), 32
    for factor, result, count, stride in BLOCKS:
        for index in range(count):
            x = layers.block(x, channels, result, factor, stride if index == 0 else 1)
            channels = result
    layers.head(layers.convolution(x, channels, 1280), 1280)
    graph = GraphProto(
        name="mobilenet",
        nodes=tuple(layers.nodes),
        initializers=tuple(layers.constants),
        inputs=(ValueInfo("image", DataType.FLOAT, INPUT_SHAPE),),
        outputs=(ValueInfo("scores", DataType.FLOAT, (1, CLASSES)),),
    )
    return encode_model(ModelProto(ir_version=8, opsets=(OpsetImport("", 17),), graph=graph))
