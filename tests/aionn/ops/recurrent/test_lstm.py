"""Claims about the LSTM operations: a plain definition for every combination of options, linking, layouts, levels and refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.recurrent.lstm import OPERATIONS
from aionn.ops.signature import Array, Call, Check, Tensor
from tests.support.contracts import level_with_outputs

CONTRACTS = {contract.type: contract for contract in OPERATIONS}
T = OperandType
ONE, UNI, BI = (
    OperationType.LSTM,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
)
BATCH, INPUT, UNITS, OUTPUT, TIME, AUXILIARY = 2, 3, 4, 3, 5, 6
TANH = 4
ABSENT = OperandLifeTime.NO_VALUE

Cell = dict[str, Array | None]
"""A cell's operands: W, R, A, b, n of each gate i, f, c, o; peepholes p of i, f, o; P, bP; h, c."""


def random_cell(
    seed: int,
    *,
    is_coupled: bool = False,
    has_peepholes: bool = False,
    has_projection: bool = False,
    has_norm: bool = False,
    source: int = INPUT,
    has_auxiliary: bool = False,
) -> Cell:
    rng = np.random.default_rng(seed)
    output = OUTPUT if has_projection else UNITS

    def values(*shape: int) -> Array:
        return (rng.standard_normal(shape) * 0.6).astype(np.float32)

    cell: Cell = {}
    for gate in "ifco":
        given = gate != "i" or not is_coupled
        cell[f"W{gate}"] = values(UNITS, source) if given else None
        cell[f"R{gate}"] = values(UNITS, output) if given else None
        cell[f"b{gate}"] = values(UNITS) if given else None
        cell[f"n{gate}"] = values(UNITS) if given and has_norm else None
        cell[f"A{gate}"] = values(UNITS, AUXILIARY) if given and has_auxiliary else None
        cell[f"p{gate}"] = values(UNITS) if given and has_peepholes and gate != "c" else None
    cell["P"] = values(output, UNITS) if has_projection else None
    cell["bP"] = values(output) if has_projection else None
    cell["h"], cell["c"] = values(BATCH, output), values(BATCH, UNITS)
    return cell


def plain_cell(
    cell: Cell, sequence: Array, auxiliary: Array | None = None, clips: tuple[float, float] = (0, 0)
) -> tuple[Array, Array, Array]:
    """The definition with tanh as activation: outputs [time, batch, output] and both states."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def clipped(x: float, limit: float) -> float:
        return max(-limit, min(limit, x)) if limit else x

    def value(name: str) -> Array:
        array = cell[name]
        assert array is not None
        return array.astype(np.float64)

    def gate(name: str, batch: int, state: Array | None) -> list[float]:
        sums = value(f"W{name}") @ x[batch] + value(f"R{name}") @ h[batch]
        if a is not None and cell[f"A{name}"] is not None:
            sums = sums + value(f"A{name}") @ a[batch]
        if state is not None and cell[f"p{name}"] is not None:
            sums = sums + value(f"p{name}") * state
        if cell[f"n{name}"] is not None:
            mean = sum(sums) / UNITS
            variance = sum((s - mean) ** 2 for s in sums) / UNITS
            sums = (sums - mean) / math.sqrt(variance + 1e-8) * value(f"n{name}")
        return [float(s) for s in sums + value(f"b{name}")]

    h, c, outputs = value("h"), value("c"), []
    for step, x in enumerate(sequence.astype(np.float64)):
        a = None if auxiliary is None else auxiliary[step].astype(np.float64)
        next_h, next_c = np.zeros(h.shape), np.zeros(c.shape)
        for batch in range(len(x)):
            forget = [sigmoid(s) for s in gate("f", batch, c[batch])]
            take = (
                [1 - f for f in forget]
                if cell["Wi"] is None
                else [sigmoid(s) for s in gate("i", batch, c[batch])]
            )
            candidate = [math.tanh(s) for s in gate("c", batch, None)]
            for u in range(UNITS):
                next_c[batch, u] = clipped(forget[u] * c[batch, u] + take[u] * candidate[u], clips[0])
            release = [sigmoid(s) for s in gate("o", batch, next_c[batch])]
            hidden = np.array([release[u] * math.tanh(next_c[batch, u]) for u in range(UNITS)])
            if cell["P"] is not None:
                hidden = value("P") @ hidden + (value("bP") if cell["bP"] is not None else 0)
                hidden = np.array([clipped(float(v), clips[1]) for v in hidden])
            next_h[batch] = hidden
        h, c = next_h, next_c
        outputs.append(h)
    return np.array(outputs).reshape(len(sequence), *h.shape), h, c


GATED = ("Wi", "Wf", "Wc", "Wo", "Ri", "Rf", "Rc", "Ro", "pi", "pf", "po", "bi", "bf", "bc", "bo", "P", "bP")
NORMS = ("ni", "nf", "nc", "no")
AUXILIARY_WEIGHTS = ("Ai", "Af", "Ac", "Ao")


def one_arrays(x: Array, cell: Cell, clips: tuple[float, float] = (0, 0)) -> list[object]:
    scalars = [np.int32(TANH), x.dtype.type(clips[0]), x.dtype.type(clips[1])]
    return [x, *(cell[n] for n in (*GATED, "h", "c")), *scalars, *(cell[n] for n in NORMS)]


def uni_arrays(
    x: Array, cell: Cell, is_time_major: bool, clips: tuple[float, float] = (0, 0)
) -> list[object]:
    arrays = one_arrays(x, cell, clips)
    return [*arrays[:23], np.bool_(is_time_major), *arrays[23:]]


def bi_arrays(
    x: Array, forward: Cell, backward: Cell, auxiliary: Array | None, is_merged: bool, is_time_major: bool
) -> list[object]:
    cells = (forward, backward)
    return [
        x,
        *(cell[n] for cell in cells for n in GATED),
        *(cell[n] for cell in cells for n in ("h", "c")),
        auxiliary,
        *(cell[n] for cell in cells for n in AUXILIARY_WEIGHTS),
        *(np.int32(TANH), np.float32(0), np.float32(0), np.bool_(is_merged), np.bool_(is_time_major)),
        *(cell[n] for cell in cells for n in NORMS),
    ]


def run(operation: OperationType, arrays: list[object], output_count: int) -> list[Array]:
    """Runs a kernel on float32, or float16 where the first array is, and checks the shape rule against it."""
    values = [None if a is None else np.asarray(a) for a in arrays]
    assert values[0] is not None
    kind = T.TENSOR_FLOAT16 if values[0].dtype == np.float16 else T.TENSOR_FLOAT32
    inputs = [None if a is None else Tensor(Operand(kind), a) for a in values]
    call = Call(inputs, [Operand(kind)] * output_count)
    contract = CONTRACTS[operation]
    assert contract.shapes is not None
    shapes = contract.shapes(call)
    results = list(contract.execute(call))
    assert [r.shape for r in results] == [tuple(s) for s in shapes]
    assert all(r.dtype == values[0].dtype for r in results)
    return results


def sequence(seed: int, size: int = INPUT) -> Array:
    return np.random.default_rng(seed).standard_normal((TIME, BATCH, size)).astype(np.float32)


OPTIONS = list(itertools.product([False, True], repeat=4))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("is_coupled", "has_peepholes", "has_projection", "has_norm"), OPTIONS)
def test_every_combination_of_options_is_its_definition(
    is_coupled: bool, has_peepholes: bool, has_projection: bool, has_norm: bool
) -> None:
    cell = random_cell(
        7,
        is_coupled=is_coupled,
        has_peepholes=has_peepholes,
        has_projection=has_projection,
        has_norm=has_norm,
    )
    x, clips = sequence(8), (0.4, 0.3)
    expected, last_h, last_c = plain_cell(cell, x, clips=clips)
    output, h, c = run(UNI, uni_arrays(x, cell, True, clips), 3)
    for got, want in ((output, expected), (h, last_h), (c, last_c)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)
    first, first_h, first_c = plain_cell(cell, x[:1], clips=clips)
    scratch, h, c, output = run(ONE, one_arrays(x[0], cell, clips), 4)
    assert scratch.shape == (BATCH, UNITS * (3 if is_coupled else 4))
    for got, want in ((output, first[0]), (h, first_h), (c, first_c)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)


def test_lstm_without_stated_norm_weights_is_the_old_form() -> None:
    cell, x = random_cell(1, has_peepholes=True), sequence(2)
    arrays = one_arrays(x[0], cell)
    for got, want in zip(run(ONE, arrays[:23], 4), run(ONE, arrays, 4), strict=True):
        assert np.array_equal(got, want)


def test_clips_bound_state_and_projection() -> None:
    cell = random_cell(3, has_projection=True)
    _, h, c, _ = run(ONE, one_arrays(sequence(4)[0], cell, (0.01, 0.02)), 4)
    assert np.abs(c).max() == np.float32(0.01)
    assert np.abs(h).max() <= np.float32(0.02)


def test_layout_only_moves_the_axes() -> None:
    cell, x = random_cell(5), sequence(6)
    by_time = run(UNI, uni_arrays(x, cell, True), 3)
    by_batch = run(UNI, uni_arrays(x.swapaxes(0, 1), cell, False), 3)
    assert np.array_equal(by_time[0], by_batch[0].swapaxes(0, 1))
    assert np.array_equal(by_time[1], by_batch[1])
    assert np.array_equal(by_time[2], by_batch[2])


@pytest.mark.parametrize("linking", ["none", "parallel", "cross"])
@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("is_time_major", [False, True])
def test_both_directions_in_every_linking(linking: str, is_merged: bool, is_time_major: bool) -> None:
    x = sequence(10)
    auxiliary = None if linking == "none" else sequence(11, AUXILIARY)
    # The cells differ in their options: each follows its own omissions.
    forward = random_cell(12, has_norm=True, has_auxiliary=linking == "cross")
    backward = random_cell(
        13,
        is_coupled=True,
        has_peepholes=True,
        has_projection=True,
        has_auxiliary=linking == "cross",
        source=AUXILIARY if linking == "parallel" else INPUT,
    )
    crossed = auxiliary if linking == "cross" else None
    want_forward, *forward_states = plain_cell(forward, x, crossed)
    own = auxiliary if linking == "parallel" and auxiliary is not None else x
    reverse = slice(None, None, -1)
    want_backward, *backward_states = plain_cell(
        backward, own[reverse], None if crossed is None else crossed[reverse]
    )
    want = [want_forward, want_backward[reverse]]
    if is_merged:
        want = [np.concatenate(want, axis=2)]

    def laid_out(array: Array) -> Array:
        return array if is_time_major else array.swapaxes(0, 1)

    given = None if auxiliary is None else laid_out(auxiliary)
    arrays = bi_arrays(laid_out(x), forward, backward, given, is_merged, is_time_major)
    got = run(BI, arrays, len(want) + 4)
    for a, b in zip(got, [*map(laid_out, want), *forward_states, *backward_states], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    for a, b in zip(run(BI, arrays, len(want)), got, strict=False):
        assert np.array_equal(a, b)


def test_float16_is_rounded_once() -> None:
    cell, x = random_cell(20, has_peepholes=True, has_projection=True, has_norm=True), sequence(21)
    halves = {k: None if v is None else v.astype(np.float16) for k, v in cell.items()}
    wides = {k: None if v is None else v.astype(np.float32) for k, v in halves.items()}
    half = x.astype(np.float16)
    got = run(UNI, uni_arrays(half, halves, True, (0.5, 0.5)), 3)
    want = run(UNI, uni_arrays(half.astype(np.float32), wides, True, (0.5, 0.5)), 3)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b.astype(np.float16))


def test_empty_sequence_returns_the_states() -> None:
    cell = random_cell(22)
    output, h, c = run(UNI, uni_arrays(np.zeros((0, BATCH, INPUT), np.float32), cell, True), 3)
    assert output.shape == (0, BATCH, UNITS)
    assert np.array_equal(h, np.asarray(cell["h"]))
    assert np.array_equal(c, np.asarray(cell["c"]))


def test_results_share_no_memory_with_inputs_or_each_other() -> None:
    cell = random_cell(25)
    for operation, arrays, count in (
        (UNI, uni_arrays(np.zeros((0, BATCH, INPUT), np.float32), cell, True), 3),
        (ONE, one_arrays(sequence(26)[0], cell), 4),
    ):
        results = run(operation, arrays, count)
        others = [np.asarray(a) for a in arrays if a is not None]
        for index, result in enumerate(results):
            assert not any(np.may_share_memory(result, other) for other in (*others, *results[:index]))


def test_derived_weights_are_kept_for_constants_only() -> None:
    cell, x = random_cell(23), sequence(24)
    for is_constant in (True, False):
        arrays = [None if a is None else np.asarray(a) for a in uni_arrays(x, cell, True)]
        kept: dict[str, object] = {}
        inputs = [
            None if a is None else Tensor(Operand(T.TENSOR_FLOAT32), a, is_constant=is_constant)
            for a in arrays
        ]
        CONTRACTS[UNI].execute(Call(inputs, [Operand(T.TENSOR_FLOAT32)], kept=kept))
        assert bool(kept) == is_constant


def operands_of(operation: OperationType, arrays: list[object], kind: OperandType) -> list[Operand]:
    """The operands that would take the arrays."""
    scalar = T.FLOAT16 if kind == T.TENSOR_FLOAT16 else T.FLOAT32
    types = {np.int32: T.INT32, np.float32: scalar, np.bool_: T.BOOL}
    result = []
    for index, a in enumerate(arrays):
        if a is None:
            result.append(Operand(kind, lifetime=ABSENT))
        elif isinstance(a, np.ndarray):
            result.append(Operand(kind, a.shape))
        else:
            assert index > 0
            result.append(Operand(types[type(a)]))
    return result


def legal(operation: OperationType, kind: OperandType = T.TENSOR_FLOAT32) -> list[Operand]:
    options = {"has_peepholes": True, "has_projection": True, "has_norm": True}
    forward, backward = (random_cell(i, has_auxiliary=True, **options) for i in (1, 2))
    x = sequence(3)
    if operation == ONE:
        return operands_of(ONE, one_arrays(x[0], forward), kind)
    if operation == UNI:
        return operands_of(UNI, uni_arrays(x, forward, True), kind)
    return operands_of(BI, bi_arrays(x, forward, backward, sequence(4, AUXILIARY), False, True), kind)


@pytest.mark.parametrize(
    ("operation", "kind", "output_count", "level"),
    [
        (ONE, T.TENSOR_FLOAT32, 4, 3),
        (ONE, T.TENSOR_FLOAT16, 4, 3),
        (UNI, T.TENSOR_FLOAT32, 1, 3),
        (UNI, T.TENSOR_FLOAT16, 3, 4),
        (BI, T.TENSOR_FLOAT32, 1, 3),
        (BI, T.TENSOR_FLOAT16, 2, 3),
        (BI, T.TENSOR_FLOAT32, 5, 4),
        (BI, T.TENSOR_FLOAT32, 6, 4),
    ],
)
def test_level_follows_type_and_outputs(
    operation: OperationType, kind: OperandType, output_count: int, level: int
) -> None:
    assert level_with_outputs(operation, legal(operation, kind), output_count) == level


def test_old_form_of_lstm_needs_level_1() -> None:
    assert level_with_outputs(ONE, legal(ONE)[:23], 4) == 1
    assert level_with_outputs(ONE, legal(ONE, T.TENSOR_FLOAT16)[:23], 4) == 3


MISSING = Operand(T.TENSOR_FLOAT32, lifetime=ABSENT)


@pytest.mark.parametrize(
    ("operation", "index", "replacement", "message"),
    [
        (ONE, 0, Operand(T.TENSOR_INT32, (2, 3)), "input 0: expected TENSOR_FLOAT32 or TENSOR_FLOAT16"),
        (ONE, 21, Operand(T.FLOAT16), "input 21: expected FLOAT32, got FLOAT16"),
        (ONE, 2, MISSING, "input 2: expected a value"),
        (ONE, 18, MISSING, "input 18: expected a value"),
        (ONE, 1, MISSING, "inputs 1 to 12: expected input gate together or not at all"),
        (ONE, 12, MISSING, "inputs 1 to 12: expected input gate together or not at all"),
        (ONE, 10, MISSING, "inputs 10 to 11: expected peephole weights together"),
        (ONE, 9, MISSING, "inputs 9 to 10: expected peephole weights together"),
        (ONE, 16, MISSING, "input 17: expected no value, since there are no projection weights"),
        (ONE, 25, MISSING, "inputs 24 to 26: expected normalisation weights together"),
        (ONE, 23, MISSING, "inputs 23 to 24: expected normalisation weights together"),
        (ONE, 13, Operand(T.TENSOR_FLOAT32, (UNITS + 1,)), r"input 13: expected shape \[units = 4\]"),
        (
            ONE,
            19,
            Operand(T.TENSOR_FLOAT32, (BATCH, 9)),
            r"input 19: expected shape \[batch = 2, units = 4\]",
        ),
        (UNI, 0, Operand(T.TENSOR_FLOAT32, (2, 3)), "input 0: expected shape"),
        (UNI, 23, Operand(T.INT32), "input 23: expected BOOL"),
        (UNI, 24, MISSING, "inputs 24 to 25: expected normalisation weights together"),
        (BI, 39, MISSING, "inputs 39, 41 and 45: expected an auxiliary input"),
        (BI, 42, MISSING, "inputs 41 to 43: expected auxiliary weights together"),
        (BI, 44, MISSING, "inputs 44 to 45: expected auxiliary weights together"),
        (BI, 27, MISSING, "inputs 27 to 28: expected peephole weights together"),
        (BI, 38, Operand(T.TENSOR_FLOAT32, (BATCH, 9)), "input 38: expected shape"),
        (
            BI,
            47,
            Operand(T.TENSOR_FLOAT32, (UNITS, 9)),
            r"input 47: expected shape \[backward units = 4, aux",
        ),
    ],
)
def test_validator_refuses_with_the_place(
    operation: OperationType, index: int, replacement: Operand, message: str
) -> None:
    inputs = legal(operation)
    inputs[index] = replacement
    with pytest.raises(InvalidModel, match=message):
        level_with_outputs(operation, inputs, {ONE: 4, UNI: 1, BI: 2}[operation])


def test_coupled_gate_has_no_norm_and_no_auxiliary_weights() -> None:
    for indexes, message in (
        ((1, 5, 12), "input 53: expected no value, since the input gate is coupled"),
        ((1, 5, 12, 53), "input 40: expected no value, since the input gate is coupled"),
    ):
        inputs = legal(BI)
        for index in indexes:
            inputs[index] = MISSING
        with pytest.raises(InvalidModel, match=message):
            level_with_outputs(BI, inputs, 2)


def test_coupled_gate_may_keep_an_unused_peephole() -> None:
    inputs = legal(ONE)
    for index in (1, 5, 12, 23):
        inputs[index] = MISSING
    assert level_with_outputs(ONE, inputs, 4) == 3
    cell = random_cell(30, is_coupled=True, has_peepholes=True)
    x = sequence(31)[0]
    without = run(ONE, one_arrays(x, cell), 4)
    with_unused = run(ONE, one_arrays(x, {**cell, "pi": np.ones(UNITS, np.float32)}), 4)
    for a, b in zip(without, with_unused, strict=True):
        assert np.array_equal(a, b)


def test_outputs_other_than_units_need_a_projection() -> None:
    for operation, indexes, count in ((ONE, (16, 17), 4), (UNI, (16, 17), 1), (BI, (33, 34), 2)):
        inputs = legal(operation)
        for index in indexes:
            inputs[index] = MISSING
        with pytest.raises(InvalidModel, match=r"expected shape \[4, 4\] without projection, got \[4, 3\]"):
            level_with_outputs(operation, inputs, count)


def test_scratch_has_one_value_per_gate_and_unit() -> None:
    inputs = legal(ONE)
    tensor = T.TENSOR_FLOAT32
    for missing, gates in (((), 4), ((1, 5, 12, 23), 3)):
        for index in missing:
            inputs[index] = MISSING
        for size in (3 * UNITS, 4 * UNITS):
            check = Check(
                ONE, inputs, [Operand(tensor, (BATCH, size)), *[Operand(tensor)] * 3], where="operation 0"
            )
            if size == gates * UNITS:
                CONTRACTS[ONE].validate(check)
            else:
                with pytest.raises(
                    InvalidModel, match=f"output 0: expected {gates * UNITS} values per batch"
                ):
                    CONTRACTS[ONE].validate(check)


def test_constant_arguments_are_checked() -> None:
    for operation, count, constants, message in (
        (ONE, 4, {20: 2}, "input 20: expected an activation"),
        (ONE, 4, {21: -1.0}, "input 21: expected a clip of at least 0"),
        (UNI, 1, {22: float("nan")}, "input 22: expected a clip of at least 0"),
        (BI, 2, {51: True}, "number of outputs: expected 1 or 5, got 2"),
        (BI, 5, {51: False}, "number of outputs: expected 2 or 6, got 5"),
        (UNI, 1, {23: False}, "input 18: expected shape"),
    ):
        with pytest.raises(InvalidModel, match=message):
            level_with_outputs(operation, legal(operation), count, constants)


def test_what_a_request_may_leave_out_is_left_to_the_execution() -> None:
    inputs = legal(UNI)
    inputs[1] = Operand(T.TENSOR_FLOAT32, (0,), lifetime=OperandLifeTime.SUBGRAPH_INPUT)
    assert level_with_outputs(UNI, inputs, 1) == 3
    cell = {**random_cell(40), "Wi": None}
    with pytest.raises(InvalidArgument, match="inputs 1 to 12: expected input gate together"):
        run(UNI, uni_arrays(sequence(41), cell, True), 1)


def test_bad_run_time_values_end_the_execution() -> None:
    x = sequence(50)
    cell = random_cell(51)
    wide = random_cell(52, has_projection=True)
    arrays = one_arrays(x[0], cell)
    for replaced, message in (
        ({20: np.int32(2)}, "input 20: expected an activation"),
        ({21: np.float32(-1)}, "input 21: expected a clip"),
        ({13: np.zeros(9, np.float32)}, "input 13: expected shape"),
        ({13: None}, "input 13: expected a value"),
        ({17: np.zeros(UNITS, np.float32)}, "input 17: expected no value"),
    ):
        broken = [replaced.get(i, a) for i, a in enumerate(arrays)]
        with pytest.raises(InvalidArgument, match=message):
            run(ONE, broken, 4)
    with pytest.raises(InvalidArgument, match=r"input 8: expected shape \[4, 4\] without projection"):
        run(ONE, one_arrays(x[0], {**wide, "P": None, "bP": None}), 4)
    both = bi_arrays(x, cell, cell, None, True, True)
    with pytest.raises(InvalidArgument, match=r"input 51: .* got 2 outputs"):
        run(BI, both, 2)
    with pytest.raises(InvalidArgument, match="inputs 39, 41 and 45: expected an auxiliary input"):
        run(BI, [*both[:39], None, *[np.zeros((UNITS, INPUT), np.float32)] * 8, *both[48:]], 1)
