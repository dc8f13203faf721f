"""What a file of this folder is made of, and the list of all files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["CASES", "Case", "case", "scattered", "thinned"]


class Case(NamedTuple):
    """A file to write.

    Attributes:
        make: Returns the module.
        inputs: Returns the example inputs.
        exporter: ``script`` for the exporter by TorchScript, ``program`` for the one by ``torch.export``.
        opset: The version of the operator set.
        open: The names of open extents by input and axis.
        is_quantized: Whether ONNX Runtime's static quantisation rewrites the file with QuantizeLinear and DequantizeLinear.
        count: Number of outputs.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    exporter: str = "script"
    opset: int = 17
    open: Mapping[str, Mapping[int, str]] = {}
    is_quantized: bool = False
    count: int = 1


CASES: dict[str, Case] = {}


def case(
    name: str,
    *shapes: Sequence[int],
    inputs: Callable[[], tuple[torch.Tensor, ...]] | None = None,
    **more: Any,
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers a file; without ``inputs`` its inputs are floats of these shapes."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES[name] = Case(make, inputs or (lambda: tuple(torch.rand(*shape) for shape in shapes)), **more)
        return make

    return register


def thinned(net: nn.Module, divisor: int) -> nn.Module:
    """The same architecture with its channels divided, except for the three of an image."""

    def channels(count: int) -> int:
        return count if count <= 3 else max(2, count // divisor)

    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            made: nn.Module | None = None
            if isinstance(layer, nn.Conv2d):
                groups = 1 if layer.groups == 1 else channels(layer.groups)
                made = nn.Conv2d(
                    channels(layer.in_channels), channels(layer.out_channels), layer.kernel_size, layer.stride,
                    layer.padding, layer.dilation, groups, layer.bias is not None,
                )  # fmt: skip
            elif isinstance(layer, nn.BatchNorm2d):
                made = nn.BatchNorm2d(channels(layer.num_features), layer.eps)
            elif isinstance(layer, nn.Linear):
                made = nn.Linear(channels(layer.in_features), channels(layer.out_features))
            if made is not None:
                setattr(parent, name, made)
    return net


def scattered(net: nn.Module, generator: torch.Generator) -> nn.Module:
    """The module with random weights. Those of an untrained network are partly zeros and ones, which hide mistakes."""

    def drawn(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    with torch.no_grad():
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            if not value.dtype.is_floating_point or "relative_position_index" in name:
                continue
            if value.ndim > 1:
                bound = (3 / max(1, value[0].numel())) ** 0.5
                value.copy_(drawn(value, -bound, bound))
            elif name.endswith("running_var") or (name.endswith("weight") and value.ndim == 1):
                value.copy_(drawn(value, 0.5, 1.5))
            elif value.ndim == 1:
                value.copy_(drawn(value, -0.3, 0.3))
    return net.eval()
