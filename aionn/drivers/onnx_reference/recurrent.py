"""RNN, GRU and LSTM: all directions, activations, lengths of sequences, clipping and layouts.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, numbers, wide
from aionn.drivers.onnx_reference.elementwise import (
    elu,
    hard_sigmoid,
    leaky_relu,
    sigmoid,
    softplus,
    thresholded_relu,
)
from aionn.errors import InvalidArgument

__all__ = ["KERNELS"]

Activation = Callable[[Array], Array]


class _Settings(NamedTuple):
    """The attributes that all three operators have."""

    direction: str
    layout: int
    clip: float
    activations: list[Activation]


def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    given: dict[str, float] = {}
    if alpha is not None:
        given["alpha"] = alpha
    if beta is not None:
        given["beta"] = beta
    plain: dict[str, Activation] = {
        "relu": lambda x: np.maximum(x, 0),
        "sigmoid": sigmoid,
        "softplus": softplus,
        "softsign": lambda x: x / (1 + np.abs(x)),
        "tanh": np.tanh,
    }
    with_numbers: dict[str, Callable[..., Array]] = {
        "affine": lambda x, alpha=1.0, beta=0.0: alpha * x + beta,
        "elu": elu,
        "hardsigmoid": hard_sigmoid,
        "leakyrelu": leaky_relu,
        "scaledtanh": lambda x, alpha=1.0, beta=1.0: alpha * np.tanh(beta * x),
        "thresholdedrelu": thresholded_relu,
    }
    key = name.lower()
    if key in plain:
        return plain[key]
    if key not in with_numbers:
        raise InvalidArgument(f"attribute 'activations': expected a known function, got {name!r:.40}")
    function = with_numbers[key]
    if key in ("elu", "leakyrelu", "thresholdedrelu"):
        given.pop("beta", None)
    return lambda x: function(x, **given)


_TAKES_ALPHA = {"affine", "elu", "hardsigmoid", "leakyrelu", "scaledtanh", "thresholdedrelu"}
_TAKES_BETA = {"affine", "hardsigmoid", "scaledtanh"}


def _activations(
    names: Sequence[str], count: int, alphas: Sequence[float] | None, betas: Sequence[float] | None
) -> list[Activation]:
    """The functions in order; only those that have numbers take one of the lists."""
    if len(names) != count:
        raise InvalidArgument(f"attribute 'activations': expected {count} functions, got {len(names)}")
    left_alphas, left_betas = list(alphas or ()), list(betas or ())
    found = []
    for name in names:
        alpha = left_alphas.pop(0) if name.lower() in _TAKES_ALPHA and left_alphas else None
        beta = left_betas.pop(0) if name.lower() in _TAKES_BETA and left_betas else None
        found.append(_activation(name, alpha, beta))
    return found


Step = Callable[[int, Array, tuple[Array, ...]], tuple[Array, ...]]
"""Computes the states after an element: from the direction, the element [batch, input] and the states [batch, units]."""


def _run(
    x: Array, lengths: Array | None, states: Sequence[Array], settings: _Settings, step: Step, count: int
) -> tuple[Array, ...]:
    """Runs over the sequence [time, batch, input] in all directions."""
    time, batch = x.shape[:2]
    lasts = [time] * batch if lengths is None else numbers(lengths)
    if len(lasts) != batch or any(not 0 <= length <= time for length in lasts):
        raise InvalidArgument(f"sequence lengths: expected {batch} numbers up to {time}, got {lasts[:20]}")
    last = np.array(lasts)
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(settings.direction)
    if ways is None or len(ways) != states[0].shape[0]:
        raise InvalidArgument(
            f"attribute 'direction': expected one for {states[0].shape[0]}, got {settings.direction!r:.40}"
        )
    outputs, finals = [], []
    for direction, is_reverse in enumerate(ways):
        own = tuple(state[direction] for state in states)
        result = np.zeros((time, *own[0].shape), x.dtype)
        for place in reversed(range(time)) if is_reverse else range(time):
            fresh = step(direction, x[place], own)
            is_inside = (place < last)[:, None]
            result[place] = np.where(is_inside, fresh[0], 0)
            own = tuple(np.where(is_inside, new, old) for new, old in zip(fresh, own, strict=True))
        outputs.append(result)
        finals.append(own)
    sequence = np.stack(outputs, 1)
    ends = [np.stack([own[i] for own in finals]) for i in range(len(states))]
    if settings.layout:
        sequence, ends = sequence.transpose(2, 0, 1, 3), [end.transpose(1, 0, 2) for end in ends]
    return (sequence, *ends)[:count]


def _prepared(x: Array, state: Array | None, weights: Array, layout: int) -> tuple[Array, Array]:
    """The sequence with time first, and the first state, [directions, batch, units]."""
    source = wide(x.transpose(1, 0, 2) if layout else x)
    shape = (weights.shape[0], source.shape[1], weights.shape[-1])
    if state is None:
        return source, np.zeros(shape, source.dtype)
    first = wide(state.transpose(1, 0, 2) if layout else state)
    if first.shape != shape:
        raise InvalidArgument(f"first state: expected shape {list(shape)}, got {list(first.shape)}")
    return source, first


def _clipped(x: Array, clip: float) -> Array:
    return np.clip(x, -clip, clip) if clip else x


def _directions(direction: str) -> int:
    return 2 if direction == "bidirectional" else 1


def rnn(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    lengths: Array | None = None,
    initial_h: Array | None = None,
    *,
    count: int,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    ways = _directions(direction)
    functions = _activations(activations or ["Tanh"] * ways, ways, activation_alpha, activation_beta)
    source, h = _prepared(x, initial_h, r, layout)
    w, r = wide(w), wide(r)
    bias = np.zeros((ways, 2 * r.shape[-1]), source.dtype) if b is None else wide(b)

    def step(way: int, element: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
        total = element @ w[way].T + states[0] @ r[way].T + sum(np.split(bias[way], 2))
        return (functions[way](_clipped(total, clip)),)

    return _run(source, lengths, (h,), _Settings(direction, layout, clip, functions), step, count)


def gru(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    lengths: Array | None = None,
    initial_h: Array | None = None,
    *,
    count: int,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    ways = _directions(direction)
    names = activations or ["Sigmoid", "Tanh"] * ways
    functions = _activations(names, 2 * ways, activation_alpha, activation_beta)
    source, h = _prepared(x, initial_h, r, layout)
    w, r = wide(w), wide(r)
    bias = np.zeros((ways, 6 * r.shape[-1]), source.dtype) if b is None else wide(b)

    def step(way: int, element: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
        f, g = functions[2 * way : 2 * way + 2]
        (state,) = states
        wz, wr, wh = np.split(w[way], 3)
        rz, rr, rh = np.split(r[way], 3)
        bwz, bwr, bwh, brz, brr, brh = np.split(bias[way], 6)
        z = f(_clipped(element @ wz.T + state @ rz.T + bwz + brz, clip))
        reset = f(_clipped(element @ wr.T + state @ rr.T + bwr + brr, clip))
        if linear_before_reset:
            hidden = element @ wh.T + reset * (state @ rh.T + brh) + bwh
        else:
            hidden = element @ wh.T + (reset * state) @ rh.T + bwh + brh
        return ((1 - z) * g(_clipped(hidden, clip)) + z * state,)

    return _run(source, lengths, (h,), _Settings(direction, layout, clip, functions), step, count)


def lstm(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    lengths: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    p: Array | None = None,
    *,
    count: int,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    ways = _directions(direction)
    names = activations or ["Sigmoid", "Tanh", "Tanh"] * ways
    functions = _activations(names, 3 * ways, activation_alpha, activation_beta)
    source, h = _prepared(x, initial_h, r, layout)
    _, c = _prepared(x, initial_c, r, layout)
    w, r = wide(w), wide(r)
    bias = np.zeros((ways, 8 * r.shape[-1]), source.dtype) if b is None else wide(b)
    peepholes = np.zeros((ways, 3 * r.shape[-1]), source.dtype) if p is None else wide(p)

    def step(way: int, element: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
        f, g, last = functions[3 * way : 3 * way + 3]
        state, cell = states
        gates = element @ w[way].T + state @ r[way].T + sum(np.split(bias[way], 2))
        i, o, forget, candidate = np.split(gates, 4, -1)
        pi, po, pf = np.split(peepholes[way], 3)
        opened = f(_clipped(i + pi * cell, clip))
        kept = 1 - opened if input_forget else f(_clipped(forget + pf * cell, clip))
        fresh = kept * cell + opened * g(_clipped(candidate, clip))
        shown = f(_clipped(o + po * fresh, clip))
        return shown * last(fresh), fresh

    return _run(source, lengths, (h, c), _Settings(direction, layout, clip, functions), step, count)


KERNELS: dict[str, Callable[..., Any]] = {"GRU": gru, "LSTM": lstm, "RNN": rnn}
"""The kernels by operator."""
