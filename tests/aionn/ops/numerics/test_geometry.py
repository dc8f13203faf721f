"""Claims about padding, windows and blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.hal import Operand, OperandType
from aionn.hal.windows import WindowArguments
from aionn.ops import Call, Tensor
from aionn.ops.numerics import geometry
from aionn.ops.numerics.geometry import Axis, blocks, pad_image, window_axes

SCALAR = Operand(OperandType.INT32)


def axes(values: list[int], *, extents: tuple[int, int], window: tuple[int, int], dilations: bool = False):
    arguments = WindowArguments.consecutive(
        0, 0, is_explicit=len(values) >= 7, has_layout=dilations, has_dilation=dilations
    )
    call = Call([Tensor(SCALAR, np.int32(value)) for value in values], [])
    return window_axes(call, arguments, *extents, *window)


def test_explicit_padding_comes_left_right_top_bottom() -> None:
    down, across = axes([1, 2, 0, 1, 2, 1, 0], extents=(6, 7), window=(2, 3))
    assert (across.before, across.after, across.stride, across.count) == (1, 2, 2, 4)
    assert (down.before, down.after, down.stride, down.count) == (0, 1, 1, 6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1, 1, 0], "implicit padding of 1 or 2, got 0"),
        ([3, 1, 1, 0], "implicit padding of 1 or 2, got 3"),
        ([1, 0, 1, 0], "stride of at least 1, got 0"),
        ([-1, 0, 0, 0, 1, 1, 0], "padding of at least 0, got -1"),
        ([3, 0, 0, 0, 1, 1, 0], "less than the window's width of 3"),
        ([2, 1, 1, 0, 0, 4, 1], "width of at most 7, got 9 with dilation"),
        ([2, 1, 1, 0, 0, 0, 1], "dilation of at least 1, got 0"),
    ],
)
def test_illegal_windows_are_refused_with_the_place(values: list[int], message: str) -> None:
    dilations = len(values) == 7 and values[0] == 2
    arguments = WindowArguments.consecutive(
        0, 0, is_explicit=len(values) == 7 and not dilations, has_layout=dilations, has_dilation=dilations
    )
    call = Call([Tensor(SCALAR, np.int32(value)) for value in values], [])
    with pytest.raises(InvalidArgument, match=message):
        window_axes(call, arguments, 6, 7, 2, 3)


def test_valid_taps_count_what_lies_in_the_image() -> None:
    axis = Axis(extent=5, window=3, stride=2, dilation=1, before=1, after=2, count=3)
    inside = np.pad(np.ones(5), (1, 2))
    assert axis.valid_taps().tolist() == [inside[o * 2 : o * 2 + 3].sum() for o in range(3)]


def test_padded_phases_are_every_nth_column() -> None:
    rng = np.random.default_rng(1)
    for before, after, phases in itertools.product(range(4), range(4), range(1, 5)):
        image = rng.integers(0, 100, (2, 3, 6, 2)).astype(np.uint8)
        down, across = Axis(3, 3, 1, 1, 1, 1, 3), Axis(6, 5, phases, 1, before, after, 1)
        whole = np.pad(image, ((0, 0), (1, 1), (before, after), (0, 0)), constant_values=7)
        for phase in range(phases):
            got = pad_image(image, down, across, 7, np.float32, phase=phase, phases=phases)
            assert got.flags.c_contiguous and got.dtype == np.float32
            np.testing.assert_array_equal(got, whole[:, :, phase::phases])


def test_unpadded_image_of_the_right_type_is_not_copied() -> None:
    image = np.zeros((1, 4, 4, 2), np.float32)
    plain = Axis(4, 2, 1, 1, 0, 0, 3)
    assert pad_image(image, plain, plain, 0, np.float32) is image


@pytest.mark.parametrize(
    ("batch", "rows", "elements"), [(1, 1, 1), (7, 5, 3), (3, 40, 11), (2, 9, 1000), (0, 4, 4)]
)
def test_blocks_cover_every_row_once_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch, batch: int, rows: int, elements: int
) -> None:
    monkeypatch.setattr(geometry, "BLOCK_ELEMENTS", 100)
    seen = np.zeros((batch, rows), int)
    for images, part in blocks(batch, rows, elements):
        seen[images, part] += 1
        # A block is contiguous: whole images, or rows of one.
        assert part == slice(0, rows) or images.stop - images.start == 1
        assert seen[images, part].size * elements <= max(100, elements)
    assert (seen == 1).all()
