"""What a file of this folder is made of, and the list of all files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

layers = tf.keras.layers
F32, I32, I64, BOOL = tf.float32, tf.int32, tf.int64, tf.bool

SCHEMES = ("float", "float16", "dynamic", "int8", "int8 float io", "uint8", "int16x8", "int16x8 float io")


class Case:
    """A file to write.

    Args:
        make: Gives a Keras model, a concrete function, or a module with signatures.
        scheme: One of ``SCHEMES``.
        ranges: For each input the least and the largest value that tests give it; by default reals from -2 to 2, integers 0 and 1.
        shapes: For each input the shape that tests give it where the file leaves extents open.
        custom: Whether TensorFlow's own operators may be left in the file.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        scheme: str = "float",
        ranges: Sequence[tuple[float, float]] = (),
        shapes: Sequence[Sequence[int]] = (),
        custom: bool = False,
    ) -> None:
        assert scheme in SCHEMES
        self.make, self.scheme, self.ranges, self.shapes, self.custom = make, scheme, ranges, shapes, custom


CASES: dict[str, Case] = {}


def case(name: str, **more: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = Case(make, **more)
        return make

    return register


def spec(shape: Sequence[int | None], dtype: Any = F32) -> Any:
    return tf.TensorSpec(shape, dtype)


def function(name: str, body: Callable[..., Any], *specs: Any, **more: Any) -> None:
    """A file of one function."""
    CASES[name] = Case(lambda: tf.function(body).get_concrete_function(*specs), **more)


def network(name: str, shape: Sequence[int | None], *parts: Any, schemes: Sequence[str] = ("float",)) -> None:
    """A sequence of Keras layers, made anew for each scheme."""

    def make() -> Any:
        return tf.keras.Sequential([tf.keras.Input(shape[1:], batch_size=shape[0]), *[p() for p in parts]])

    for scheme in schemes:
        suffix = "" if scheme == "float" else "_" + scheme.replace(" ", "_")
        CASES[name + suffix] = Case(make, scheme)


def weight(shape: Sequence[int], dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(sum(shape) + len(shape))
    if np.dtype(dtype).kind == "f":
        return rng.uniform(-1, 1, shape).astype(dtype)
    return rng.integers(-9, 9, shape).astype(dtype)
