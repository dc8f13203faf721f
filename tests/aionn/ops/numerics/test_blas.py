"""Results do not depend on the threads of numpy's matrix library, and the application's number of threads stays what it was."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import aionn.ops
from aionn.errors import GeneralFailure
from aionn.hal import Model, OperandType, OperationType
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder
from aionn.ops import PRODUCT_FAMILIES
from aionn.ops.numerics import blas

functions = blas._functions()
pytestmark = pytest.mark.skipif(functions is None, reason="numpy uses another library than OpenBLAS")

WATCHDOG_S = 60.0

PRODUCTS_OF_NUMPY = ("matmul", "dot", "vdot", "inner", "tensordot", "einsum", "linalg")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Every test begins with two threads."""
    assert functions is not None
    before = functions.get()
    functions.set(2)
    yield
    functions.set(before)


def product_model(rows: int, depth: int, columns: int) -> Model:
    g = GraphBuilder()
    a = g.input(OperandType.TENSOR_FLOAT32, (rows, depth))
    b = g.input(OperandType.TENSOR_FLOAT32, (depth, columns))
    return g.build([g.result(OperationType.BATCH_MATMUL, [a, b, False, False], a, (rows, columns))])


# Products whose last bits depend on the number of threads.
SIZES = ((32, 692, 504), (6, 656, 452), (96, 595, 36), (1, 1024, 1000))


@pytest.mark.parametrize("size", SIZES)
def test_result_is_the_same_with_any_number_of_threads(size: tuple[int, int, int]) -> None:
    assert functions is not None
    rows, depth, columns = size
    generator = np.random.default_rng(1)
    a = generator.standard_normal((rows, depth)).astype(np.float32)
    b = generator.standard_normal((depth, columns)).astype(np.float32)
    interpreter = Interpreter(product_model(rows, depth, columns))
    found = set()
    for count in (1, 2, 3):
        functions.set(count)
        (result,) = interpreter.run([a, b], RunControl())
        found.add(result.tobytes())
        assert blas.thread_count() == count
    assert len(found) == 1


def test_only_the_families_that_are_named_multiply_matrices() -> None:
    folder = Path(aionn.ops.__file__).parent
    helpers = {"recurrent.lstm_cell": "recurrent.lstm", "recurrent.recurrence": "recurrent.rnn"}
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            is_call = isinstance(node, ast.Attribute) and node.attr in PRODUCTS_OF_NUMPY
            if is_product or is_call:
                family = ".".join(path.relative_to(folder).with_suffix("").parts)
                found.add(helpers.get(family, family))
    assert found == set(PRODUCT_FAMILIES)


@pytest.mark.thorough
def test_result_is_the_same_in_processes_with_other_environments() -> None:
    program = (
        "import numpy as np, sys\n"
        "from tests.aionn.ops.numerics.test_blas import product_model\n"
        "from aionn.interpreter import Interpreter, RunControl\n"
        "r = np.random.default_rng(2)\n"
        "a, b = (r.standard_normal(s).astype(np.float32) for s in ((32, 692), (692, 504)))\n"
        "sys.stdout.buffer.write(Interpreter(product_model(32, 692, 504)).run([a, b], RunControl())[0].tobytes())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "OPENBLAS_NUM_THREADS": count},
            stdout=subprocess.PIPE,
            timeout=WATCHDOG_S,
            check=True,
        ).stdout
        for count in ("1", "2")
    }
    assert len(found) == 1


def test_threads_come_back_when_the_last_of_overlapping_runs_is_over() -> None:
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with blas.one_thread:
            inside.set()
            assert leave.wait(WATCHDOG_S)

    other = threading.Thread(target=run)
    other.start()
    assert inside.wait(WATCHDOG_S)
    with blas.one_thread:
        assert blas.thread_count() == 1
    assert blas.thread_count() == 1
    leave.set()
    other.join()
    assert blas.thread_count() == 2


def test_threads_come_back_after_a_run_that_failed() -> None:
    model = product_model(2, 3, 4)
    control = RunControl(is_cancelled=lambda: True)
    with pytest.raises(GeneralFailure):
        Interpreter(model).run([np.zeros((2, 3), np.float32), np.zeros((3, 4), np.float32)], control)
    assert blas.thread_count() == 2
