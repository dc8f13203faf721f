"""Convolutions and products of matrices, and the windows that pools have as well.

The operations here take images with channels last; ``writer`` transposes an image of which there is no such form.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import FusedActivation, OperationType
from aionn.models.builder import Value
from aionn.models.onnx.formula import Formula, activated, broadcasts_to, expanded
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.tensors import Array, Inexpressible, Shape, Tensor, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["Window", "check_image", "conv", "conv_transpose", "from_image", "gemm", "image_of", "matmul"]

LAST = (0, 2, 3, 1)
"""The order of the axes of an image with channels last."""

GROUPS_MAX = 64
"""Most groups of a convolution that is written as a CONV_2D for each group."""


class Window:
    """The spatial attributes of a convolution or pool, each for height and width.

    Attributes:
        kernel: Extents of the window.
        strides: Distances between windows.
        dilations: Distances between the elements of a window.
        pads: Top, left, bottom, right.
    """

    def __init__(
        self, op: Operator, kernel: Sequence[int], extents: Sequence[int], *, is_transposed: bool = False
    ) -> None:
        rank = len(kernel)
        if rank not in (1, 2):
            raise Inexpressible(f"windows of {rank} axes")
        strides = op.integers("strides") or [1] * rank
        dilations = op.integers("dilations") or [1] * rank
        pads = op.integers("pads") or [0] * 2 * rank
        mode = op.text("auto_pad", "NOTSET")
        if (
            not len(strides) == len(dilations) == rank
            or len(pads) != 2 * rank
            or min(*strides, *dilations, *kernel) < 1
        ):
            op.refuse(
                "window", f"{rank} positive strides and dilations", f"{strides}, {dilations}, {list(kernel)}"
            )
        if min(pads) < 0:
            raise Inexpressible("negative padding")
        if mode in ("SAME_UPPER", "SAME_LOWER") and not is_transposed:
            pads = _same(mode, kernel, strides, dilations, extents)
        elif mode == "VALID":
            pads = [0] * 2 * rank
        elif mode not in ("NOTSET", "", "SAME_UPPER", "SAME_LOWER"):
            op.refuse("attribute 'auto_pad'", "NOTSET, SAME_UPPER, SAME_LOWER or VALID", mode)
        self.mode = mode
        lead = [1] * (2 - rank)
        self.kernel = [*lead, *kernel]
        self.strides = [*lead, *strides]
        self.dilations = [*lead, *dilations]
        self.pads = pads if rank == 2 else [0, pads[0], 0, pads[1]]

    @property
    def reach(self) -> list[int]:
        """Extents of the window with its dilation."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def arguments(self) -> list[int]:
        """Left, right, top, bottom; stride width, stride height."""
        top, left, bottom, right = self.pads
        return [left, right, top, bottom, self.strides[1], self.strides[0]]


def _same(
    mode: str, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], extents: Sequence[int]
) -> list[int]:
    before, after = [], []
    for k, s, d, extent in zip(kernel, strides, dilations, extents, strict=True):
        total = max(0, (-(-extent // s) - 1) * s + (k - 1) * d + 1 - extent)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return [*before, *after]


def image_of(g: GraphWriter, x: Tensor) -> Value:
    """The form of an image with channels last; a value with one spatial axis becomes an image of height 1."""
    if x.rank == 4:
        return g.form(x, LAST)
    n, c, w = x.shape
    return g.reshaped(g.form(x, (0, 2, 1)), (n, 1, w, c))


def from_image(
    g: GraphWriter, x: Tensor, value: Value, dtype: str | None = None, limits: tuple[int, int] | None = None
) -> Tensor:
    """The tensor of an image with channels last that was computed from ``x``, which has as many axes."""
    n, h, w, c = value.operand.dimensions
    if x.rank == 4:
        return g.tensor(value, dtype or x.dtype, (n, c, h, w), order=LAST, limits=limits)
    return g.tensor(g.reshaped(value, (n, w, c)), dtype or x.dtype, (n, c, w), order=(0, 2, 1), limits=limits)


def check_image(op: Operator, x: Tensor) -> None:
    """Checks that a value is an image of floats with one or two spatial axes."""
    if x.rank < 3:
        op.refuse("input 0", "an image", list(x.shape))
    if x.rank > 4:
        raise Inexpressible(f"windows of {x.rank - 2} axes")
    if not x.is_float:
        raise Inexpressible(f"values of type {x.dtype}")


def _kernel(op: Operator, weights: Tensor) -> list[int]:
    kernel = list(weights.shape[2:])
    given = op.integers("kernel_shape")
    if given is not None and given != kernel:
        op.refuse("attribute 'kernel_shape'", f"that of the weights {kernel}", given)
    return kernel


def _padded(g: GraphWriter, value: Value, window: Window) -> Value:
    """The image; if the HAL's windows do not permit the padding, the image with zeros around it."""
    reach = window.reach
    top, left, bottom, right = window.pads
    if max(top, bottom) < reach[0] and max(left, right) < reach[1]:
        return value
    window.pads = [0, 0, 0, 0]
    table = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
    return g.emit(OperationType.PAD_V2, [value, g.constant_value(table), g.scalar(0.0, value)])


def _bias(g: GraphWriter, op: Operator, like: Value, count: int) -> Value:
    if not op.has(2):
        return g.like(0.0, like, (count,))
    bias = op.input(2)
    if bias.shape != (count,):
        op.refuse("input 2 (bias)", [count], list(bias.shape))
    return g.form(bias)


def conv(g: GraphWriter, op: Operator) -> Tensor:
    """CONV_2D, DEPTHWISE_CONV_2D or GROUPED_CONV_2D; its constants can contain a following scale and offset of the channels."""
    x, weights = op.input(0), op.input(1)
    check_image(op, x)
    groups = op.integer("group", 1)
    channels, depth = x.shape[1], weights.shape[0]
    if weights.rank != x.rank or groups < 1 or channels != weights.shape[1] * groups or depth % groups:
        op.refuse("weights", f"ones for {channels} channels in {groups} groups", list(weights.shape))
    bias = op.input(2) if op.has(2) else None
    if bias is not None and bias.shape != (depth,):
        op.refuse("input 2 (bias)", [depth], list(bias.shape))
    result = _convolved(g, op, weights, bias, op.activation)
    array = weights.array
    offsets = np.zeros(depth) if bias is None else bias.array
    if array is None or offsets is None or op.activation:
        return result

    def rescaled(factor: Array, offset: Array, activation: FusedActivation) -> Tensor:
        g.charge(array.nbytes)
        across = factor.reshape(-1, *(1,) * (array.ndim - 1))
        scaled = g.constant((array * across).astype(array.dtype))
        moved = g.constant((offsets * factor + offset).astype(array.dtype))
        return _convolved(g, op, scaled, moved, activation)

    result.rescaled = rescaled
    return result


def _convolved(
    g: GraphWriter, op: Operator, weights: Tensor, bias: Tensor | None, activation: FusedActivation
) -> Tensor:
    x = op.input(0)
    groups = op.integer("group", 1)
    window = Window(op, _kernel(op, weights), x.shape[2:])
    channels, depth = x.shape[1], weights.shape[0]
    value = _padded(g, image_of(g, x), window)
    offsets = g.like(0.0, value, (depth,)) if bias is None else g.form(bias)
    is_depthwise = 1 < groups == channels
    filters = _filters(g, weights, is_depthwise=is_depthwise)
    dilations = [window.dilations[1], window.dilations[0]]
    tail = [int(activation), False]
    if groups == 1:
        arguments = [*window.arguments(), *tail, *dilations]
        result = g.emit(OperationType.CONV_2D, [value, filters, offsets, *arguments])
    elif is_depthwise:
        arguments = [*window.arguments(), depth // channels, *tail, *dilations]
        result = g.emit(OperationType.DEPTHWISE_CONV_2D, [value, filters, offsets, *arguments])
    elif dilations == [1, 1]:
        arguments = [*window.arguments(), groups, *tail]
        result = g.emit(OperationType.GROUPED_CONV_2D, [value, filters, offsets, *arguments])
    else:
        result = _split_conv(g, [value, filters, offsets], groups, [*window.arguments(), *tail, *dilations])
    return from_image(g, x, result)


def _filters(g: GraphWriter, weights: Tensor, *, is_depthwise: bool = False) -> Value:
    """The filters as [depth out, height, width, depth in], or [1, height, width, depth out] for a depthwise convolution."""
    shape = weights.shape if weights.rank == 4 else (*weights.shape[:2], 1, weights.shape[2])
    order = (1, 2, 3, 0) if is_depthwise else LAST
    if weights.array is not None:
        return g.constant_value(weights.array.reshape(shape).transpose(order), weights.dtype)
    return g.transposed(g.reshaped(g.form(weights), shape), shape, order)


def _split_conv(g: GraphWriter, values: list[Value], groups: int, arguments: list[int | bool]) -> Value:
    """A convolution for each group, since GROUPED_CONV_2D has no dilation."""
    if groups > GROUPS_MAX:
        raise Inexpressible(f"more than {GROUPS_MAX} groups with dilation")
    value, filters, bias = values
    parts = []
    for what, axis in ((value, 3), (filters, 0), (bias, 0)):
        parts.append(g.emit_all(OperationType.SPLIT, [what, axis, groups], [None] * groups))
    results = [g.emit(OperationType.CONV_2D, [*three, *arguments]) for three in zip(*parts, strict=True)]
    return g.emit(OperationType.CONCATENATION, [*results, 3])


def conv_transpose(g: GraphWriter, op: Operator) -> Tensor:
    x, weights = op.input(0), op.input(1)
    check_image(op, x)
    groups = op.integer("group", 1)
    kernel = _kernel(op, weights)
    window = Window(op, kernel, x.shape[2:], is_transposed=True)
    if weights.rank != x.rank or weights.shape[0] != x.shape[1] or groups < 1 or x.shape[1] % groups:
        op.refuse("weights", f"ones for {x.shape[1]} channels", list(weights.shape))
    if weights.array is None:
        raise Inexpressible("weights (input 1) must be a constant")
    rank = len(kernel)
    extra = [0] * (2 - rank) + (op.integers("output_padding") or [0] * rank)
    _transposed_pads(op, window, extra, x)
    depth = weights.shape[1] * groups
    value = image_of(g, x)
    bias = _bias(g, op, value, depth)
    kernels = weights.array.reshape(*weights.shape[:2], *window.kernel)
    kernels = _spread(g, kernels, window)
    # [in, out, height, width] becomes [out, height, width, in], group by group.
    parts = np.split(kernels, groups)
    act = int(op.activation)
    arguments = [*window.arguments(), act, False]
    filters = [g.constant_value(part.transpose(1, 2, 3, 0), weights.dtype) for part in parts]
    if groups == 1:
        result = g.emit(OperationType.TRANSPOSE_CONV_2D, [value, filters[0], bias, *arguments])
    elif groups > GROUPS_MAX:
        raise Inexpressible(f"more than {GROUPS_MAX} groups")
    else:
        images = g.emit_all(OperationType.SPLIT, [value, 3, groups], [None] * groups)
        biases = g.emit_all(OperationType.SPLIT, [bias, 0, groups], [None] * groups)
        results = [
            g.emit(OperationType.TRANSPOSE_CONV_2D, [*three, *arguments])
            for three in zip(images, filters, biases, strict=True)
        ]
        result = g.emit(OperationType.CONCATENATION, [*results, 3])
    return from_image(g, x, result)


def _transposed_pads(op: Operator, window: Window, extra: list[int], x: Tensor) -> None:
    """Sets the padding of a transposed convolution: the given padding, or one that results in the requested output shape."""
    given = op.integers("output_shape")
    reach, pads = window.reach, list(window.pads)
    extents = [1] * (4 - x.rank) + list(x.shape[2:])
    wanted: list[int] | None = None
    if given is not None:
        if len(given) not in (x.rank - 2, x.rank):
            op.refuse("attribute 'output_shape'", f"{x.rank - 2} extents", given)
        wanted = [1] * (4 - x.rank) + given[-(x.rank - 2) :]
    elif window.mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [e * s for e, s in zip(extents, window.strides, strict=True)]
    for axis in range(2):
        if wanted is not None:
            total = window.strides[axis] * (extents[axis] - 1) + extra[axis] + reach[axis] - wanted[axis]
            # The specification divides the total into two halves; SAME_UPPER has the larger one at the other end. Outputs beyond
            # the windows are at the end, as the test cases have them.
            half = max(0, total) // 2
            begin = half if window.mode == "SAME_UPPER" else max(0, total) - half
            pads[axis], pads[axis + 2] = begin, total - begin
        # Output padding adds outputs at the end, which less padding does as well.
        pads[axis + 2] -= extra[axis]
    window.pads = pads


def _spread(g: GraphWriter, kernels: Array, window: Window) -> Array:
    """The kernels with zeros between their elements, which replace a dilation."""
    if window.dilations == [1, 1]:
        return kernels
    g.charge(math.prod(kernels.shape[:2]) * math.prod(window.reach) * kernels.itemsize)
    spread = np.zeros((*kernels.shape[:2], *window.reach), kernels.dtype)
    spread[:, :, :: window.dilations[0], :: window.dilations[1]] = kernels
    window.kernel, window.dilations = window.reach, [1, 1]
    return spread


# Products


def gemm(g: GraphWriter, op: Operator) -> Tensor:
    """FULLY_CONNECTED for constant weights, else BATCH_MATMUL."""
    a, b = op.input(0), op.input(1)
    alpha, beta = op.real("alpha", 1.0), op.real("beta", 1.0)
    op.integer("broadcast", 1)
    turns = bool(op.integer("transA", 0)), bool(op.integer("transB", 0))
    if a.rank != 2 or b.rank != 2:
        op.refuse("inputs", "matrices", f"{list(a.shape)} and {list(b.shape)}")
    if not a.is_float and (a.dtype != "int32" or alpha != 1 or beta != 1):
        raise Inexpressible(f"values of type {a.dtype}")
    rows, depth = reversed(a.shape) if turns[0] else a.shape
    inner, columns = reversed(b.shape) if turns[1] else b.shape
    if inner != depth:
        op.refuse("shapes", "matrices that fit", f"{list(a.shape)} and {list(b.shape)}")
    bias = op.input(2) if op.has(2) else None
    if bias is not None and not broadcasts_to(bias.shape, (rows, columns)):
        op.refuse("input 2 (bias)", f"a shape that broadcasts to {[rows, columns]}", list(bias.shape))
    # Only a bias that is the same in all rows is the vector of a FULLY_CONNECTED: a column of as many numbers is not.
    is_vector = bias is None or (bias.array is not None and broadcasts_to(bias.shape, (1, columns)))
    if b.array is not None and is_vector and a.is_float:
        weights = b.array if turns[1] else b.array.T
        if alpha != 1:
            g.charge(weights.nbytes)
            weights = weights * b.numpy_type.type(alpha)
        offsets = np.zeros(columns, b.numpy_type)
        if bias is not None and bias.array is not None:
            offsets = np.broadcast_to(bias.array.reshape(-1) * b.numpy_type.type(beta), (columns,))
        value = g.form(a, (1, 0) if turns[0] else None)
        pair = [g.constant_value(weights, b.dtype), g.constant_value(np.ascontiguousarray(offsets), b.dtype)]
        result = g.emit(OperationType.FULLY_CONNECTED, [value, *pair, int(op.activation)])
        return g.tensor(result, a.dtype, (rows, columns))
    product = Formula(g, g.emit(OperationType.BATCH_MATMUL, [g.form(a), g.form(b), *turns]))
    product = product if alpha == 1 else product * alpha
    if bias is not None and beta != 0:
        other = Formula(g, g.form(bias))
        product = product + (other if beta == 1 else other * beta)
    return g.tensor(activated(g, product.value, op.activation), a.dtype, (rows, columns))


def matmul(g: GraphWriter, op: Operator) -> Tensor:
    """FULLY_CONNECTED for a constant matrix, else BATCH_MATMUL of equal batches."""
    a, b = op.input(0), op.input(1)
    if not a.rank or not b.rank:
        op.refuse("inputs", "vectors or matrices", f"{list(a.shape)} and {list(b.shape)}")
    if not a.is_float and a.dtype != "int32":
        raise Inexpressible(f"values of type {a.dtype}")
    left = (1, *a.shape) if a.rank == 1 else a.shape
    right = (*b.shape, 1) if b.rank == 1 else b.shape
    if left[-1] != right[-2]:
        op.refuse("shapes", "matrices that fit", f"{list(a.shape)} and {list(b.shape)}")
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError:
        op.refuse("batches", "ones that broadcast", f"{list(a.shape)} and {list(b.shape)}")
    shape = (*batch, *(left[-2:-1] if a.rank > 1 else ()), *(right[-1:] if b.rank > 1 else ()))
    if b.array is not None and b.rank == 2 and a.is_float:
        value = g.reshaped(g.form(a), (math.prod(left[:-1]), left[-1]))
        weights = g.constant_value(b.array.T, b.dtype)
        bias = g.like(0.0, value, (right[-1],))
        result = g.emit(OperationType.FULLY_CONNECTED, [value, weights, bias, int(op.activation)])
        return g.tensor(g.reshaped(result, stored_shape(shape)), a.dtype, shape)
    count = math.prod(batch)
    values, turns = [], []
    for tensor, matrix in ((a, left), (b, right)):
        value, is_turned = _matrices(g, tensor, matrix, batch)
        values.append(g.reshaped(value, (count, *(reversed(matrix[-2:]) if is_turned else matrix[-2:]))))
        turns.append(is_turned)
    result = g.emit(OperationType.BATCH_MATMUL, [*values, *turns])
    result = g.reshaped(result, stored_shape(shape))
    return g.tensor(activated(g, result, op.activation), a.dtype, shape)


def _matrices(g: GraphWriter, tensor: Tensor, full: Shape, batch: Shape) -> tuple[Value, bool]:
    """A form with all batches, and whether its matrices are transposed."""
    if full[:-2] == batch and tensor.shape == full:
        swapped = (*range(tensor.rank - 2), tensor.rank - 1, tensor.rank - 2)
        if tensor.array is None and tensor.order == swapped:
            return g.form(tensor, swapped), True
        return g.form(tensor), False
    plain = g.constant(tensor.array.reshape(full), tensor.dtype) if tensor.array is not None else None
    if plain is None:
        plain = g.tensor(g.reshaped(g.form(tensor), stored_shape(full)), tensor.dtype, full)
    return expanded(g, plain, (*batch, *full[-2:])), False
