"""Recurrent layers: imported, they compute what LiteRT computes after its variable tensors were reset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.tflite import load_tflite

BATCH, TIME, INPUT, UNITS, OUTPUT = 2, 5, 3, 4, 4
CASES: dict[str, Any] = {}


class Parts:
    """Collects the tensors of one operator; None leaves one out."""

    def __init__(self, t: Any) -> None:
        self.t = t
        self.rng = np.random.default_rng(7)
        self.tensors: list[Any] = []
        self.indexes: list[int] = []

    def tensor(self, tensor: Any) -> None:
        self.indexes.append(len(self.tensors))
        self.tensors.append(tensor)

    def weights(self, *shapes: Any) -> None:
        for shape in shapes:
            if shape is None:
                self.indexes.append(-1)
            else:
                value = self.rng.uniform(-0.7, 0.7, shape).astype(np.float32)
                self.tensor(self.t.T("float32", value=value))

    def states(self, *shapes: tuple[int, ...]) -> None:
        for shape in shapes:
            self.tensor(self.t.T("float32", shape, is_variable=True))

    def graph(self, code: int, options: str, values: dict[str, Any], *outputs: tuple[int, ...]) -> Any:
        first = len(self.tensors)
        tensors = [*self.tensors, *(self.t.f32(*shape) for shape in outputs)]
        outs = list(range(first, len(tensors)))
        return self.t.Graph(tensors, [self.t.Op(code, self.indexes, outs, options, values)], [0], outs)


def cell(p, *, is_cifg=False, has_peepholes=False, has_projection=False):
    first = None if is_cifg else (UNITS, INPUT)
    out = 2 if has_projection else UNITS
    p.weights(first, *[(UNITS, INPUT)] * 3)
    p.weights(None if is_cifg else (UNITS, out), *[(UNITS, out)] * 3)
    peephole = (UNITS,) if has_peepholes else None
    p.weights(None if is_cifg else peephole, peephole, peephole)
    p.weights(None if is_cifg else (UNITS,), *[(UNITS,)] * 3)
    p.weights((out, UNITS) if has_projection else None, (out,) if has_projection else None)
    return out


for _name, _parts in {
    "plain": {},
    "cifg": {"is_cifg": True},
    "peepholes": {"has_peepholes": True},
    "projection": {"has_projection": True},
}.items():
    for _time_major in (False, True):

        def _sequence(t, parts=_parts, time_major=_time_major):
            p = Parts(t)
            lead = (TIME, BATCH) if time_major else (BATCH, TIME)
            p.tensor(t.f32(*lead, INPUT))
            out = cell(p, **parts)
            p.states((BATCH, out), (BATCH, UNITS))
            values = {"fused_activation_function": 4, "time_major": time_major, "cell_clip": 1.5}
            return p.graph(44, "UnidirectionalSequenceLSTMOptions", values, (*lead, out))

        CASES[f"UNIDIRECTIONAL_SEQUENCE_LSTM {_name} time-major {_time_major}"] = _sequence

    def _step(t, parts=_parts):
        p = Parts(t)
        p.tensor(t.f32(BATCH, INPUT))
        out = cell(p, **parts)
        p.states((BATCH, out), (BATCH, UNITS))
        return p.graph(16, "LSTMOptions", {"fused_activation_function": 4}, (BATCH, out))

    CASES[f"LSTM {_name}"] = _step


def _normalised(t):
    p = Parts(t)
    p.tensor(t.f32(BATCH, TIME, INPUT))
    cell(p)
    p.states((BATCH, UNITS), (BATCH, UNITS))
    p.weights(*[(UNITS,)] * 4)
    values = {"fused_activation_function": 4}
    return p.graph(44, "UnidirectionalSequenceLSTMOptions", values, (BATCH, TIME, UNITS))


CASES["UNIDIRECTIONAL_SEQUENCE_LSTM with norms"] = _normalised

for _merge in (False, True):
    # From its second execution on, LiteRT's merged results differ from its own first in the second batch, whatever is reset.
    _batch = 1 if _merge else BATCH

    def _both_ways(t, merge=_merge, batch=_batch):
        p = Parts(t)
        p.tensor(t.f32(batch, TIME, INPUT))
        cell(p)
        cell(p)
        p.states(*[(batch, UNITS)] * 4)
        p.weights(*[None] * 9)
        values = {"fused_activation_function": 4, "time_major": False, "merge_outputs": merge}
        outputs = [(batch, TIME, 2 * UNITS)] if merge else [(batch, TIME, UNITS)] * 2
        return p.graph(52, "BidirectionalSequenceLSTMOptions", values, *outputs)

    CASES[f"BIDIRECTIONAL_SEQUENCE_LSTM merged {_merge}"] = _both_ways

    def _rnn_both_ways(t, merge=_merge, batch=_batch):
        p = Parts(t)
        p.tensor(t.f32(batch, TIME, INPUT))
        for _ in range(2):
            p.weights((UNITS, INPUT), (UNITS, UNITS), (UNITS,))
            p.states((batch, UNITS))
        p.weights(None, None, None)
        values = {"fused_activation_function": 4, "merge_outputs": merge}
        outputs = [(batch, TIME, 2 * UNITS)] if merge else [(batch, TIME, UNITS)] * 2
        return p.graph(46, "BidirectionalSequenceRNNOptions", values, *outputs)

    CASES[f"BIDIRECTIONAL_SEQUENCE_RNN merged {_merge}"] = _rnn_both_ways


def _rnn(t):
    p = Parts(t)
    p.tensor(t.f32(BATCH, INPUT))
    p.weights((UNITS, INPUT), (UNITS, UNITS), (UNITS,))
    p.states((BATCH, UNITS))
    return p.graph(24, "RNNOptions", {"fused_activation_function": 1}, (BATCH, UNITS))


def _sequence_rnn(t):
    p = Parts(t)
    p.tensor(t.f32(BATCH, TIME, INPUT))
    p.weights((UNITS, INPUT), (UNITS, UNITS), (UNITS,))
    p.states((BATCH, UNITS))
    return p.graph(35, "SequenceRNNOptions", {"fused_activation_function": 4}, (BATCH, TIME, UNITS))


def _svdf(t):
    p = Parts(t)
    p.tensor(t.f32(BATCH, INPUT))
    p.weights((2 * UNITS, INPUT), (2 * UNITS, TIME), (UNITS,))
    p.states((BATCH, 2 * UNITS * TIME))
    return p.graph(27, "SVDFOptions", {"rank": 2}, (BATCH, UNITS))


CASES |= {"RNN": _rnn, "UNIDIRECTIONAL_SEQUENCE_RNN": _sequence_rnn, "SVDF": _svdf}


@pytest.mark.parametrize("name", CASES)
def test_import_computes_what_a_reset_interpreter_computes(name, tflite, compare_with_litert):
    compare_with_litert(CASES[name](tflite), 1e-5, is_only_optimized=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_damaged_file_loads_or_is_refused(name, tflite, load_damaged):
    load_damaged(CASES[name](tflite), name)


def test_joined_weights_of_the_basic_kernel_are_refused(tflite):
    p = Parts(tflite)
    p.tensor(tflite.f32(BATCH, INPUT))
    graph = p.graph(16, "LSTMOptions", {"kernel_type": 1}, (BATCH, UNITS))
    with pytest.raises(InvalidModel, match="1 x LSTM: the basic kernel, whose inputs are joined"):
        load_tflite(tflite.write(graph))
