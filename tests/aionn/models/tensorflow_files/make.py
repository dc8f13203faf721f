"""Writes the files of this folder with TensorFlow's own converter.

Run it in an environment of its own, outside of the source tree; nothing else needs TensorFlow::

    python3 -m venv /tmp/tensorflow && /tmp/tensorflow/bin/pip install tensorflow-cpu==2.21.0
    /tmp/tensorflow/bin/python tests/aionn/models/tensorflow_files/make.py [NAME ...]

Without names every file is written, and ``cases.json``, which says for each what values its inputs take. Weights are seeded by the
file's name, so that a file is the same whenever the same version of TensorFlow writes it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import numpy as np
import tensorflow as tf
from cases import CASES, Case

FOLDER = Path(__file__).parent
FILE_BYTES_MAX = 108 << 10
"""A file says what the converter writes, not what a network knows."""


def converter_of(made: Any, folder: str) -> Any:
    if isinstance(made, tf.keras.Model):
        return tf.lite.TFLiteConverter.from_keras_model(made)
    if isinstance(made, tf.Module) and not callable(made):
        functions = {
            name: getattr(made, name)
            for name in dir(type(made))
            if hasattr(getattr(type(made), name), "get_concrete_function")
        }
        signatures = {name: f.get_concrete_function() for name, f in sorted(functions.items())}
        tf.saved_model.save(made, folder, signatures=signatures)
        return tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=sorted(signatures))
    return tf.lite.TFLiteConverter.from_concrete_functions([made])


def convert(name: str, one: Case) -> bytes:
    seed = zlib.crc32(name.split("_int")[0].encode())
    tf.keras.utils.set_random_seed(seed % 2**31)
    made = one.make()
    if isinstance(made, tf.keras.Model):
        rng = np.random.default_rng(seed)
        for variable in made.weights:
            # Untrained biases, means and scales are zeros and ones, which hide mistakes.
            low, high = (0.5, 1.5) if "variance" in variable.path or "gamma" in variable.path else (-0.3, 0.3)
            if np.dtype(variable.dtype).kind == "f":
                variable.assign(rng.uniform(low, high, variable.shape).astype(np.float32))
    with tempfile.TemporaryDirectory() as folder:
        converter = converter_of(made, folder)
        builtins = tf.lite.OpsSet.TFLITE_BUILTINS
        if one.custom:
            converter.target_spec.supported_ops = [builtins, tf.lite.OpsSet.SELECT_TF_OPS]
        if one.scheme != "float":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if one.scheme == "float16":
            converter.target_spec.supported_types = [tf.float16]
        if "int" in one.scheme:
            shapes = [[d or 1 for d in i.shape] for i in made.inputs]

            def samples() -> Any:
                rng = np.random.default_rng(seed)
                for _ in range(8):
                    yield [rng.uniform(-2, 2, shape).astype(np.float32) for shape in shapes]

            converter.representative_dataset = samples
            kind = "int16x8" if "int16" in one.scheme else "int8"
            ops = tf.lite.OpsSet
            converter.target_spec.supported_ops = [
                ops.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
                if kind == "int16x8"
                else ops.TFLITE_BUILTINS_INT8
            ]
            if not one.scheme.endswith("float io"):
                dtype = {"int8": tf.int8, "uint8": tf.uint8, "int16x8": tf.int16}[one.scheme]
                converter.inference_input_type = converter.inference_output_type = dtype
        return bytes(converter.convert())


def write(name: str) -> None:
    data = convert(name, CASES[name])
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{len(data)} bytes, more than {FILE_BYTES_MAX}")
    (FOLDER / f"{name}.tflite").write_bytes(data)


def writes(name: str) -> bool:
    """Writes a file in a process of its own, since the converter's crashes are not exceptions; says whether it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = 1
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        write(name)
        code = 0
    except BaseException as e:
        print(f"{name}: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr)
    os._exit(code)


def main(names: Sequence[str]) -> int:
    failed = [name for name in names or sorted(CASES) if not writes(name)]
    listed = {
        name: {"ranges": one.ranges, "shapes": one.shapes}
        for name, one in sorted(CASES.items())
        if (FOLDER / f"{name}.tflite").exists()
    }
    (FOLDER / "cases.json").write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    total = sum(file.stat().st_size for file in FOLDER.glob("*.tflite"))
    print(f"{len(listed)} files, {total} bytes; {len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    import functions  # noqa: F401 - fills the list
    import networks  # noqa: F401

    sys.exit(main(sys.argv[1:]))
