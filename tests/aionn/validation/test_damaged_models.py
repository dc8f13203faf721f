"""Whatever is changed in a model, the rules accept or refuse it; no other exception leaves them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from aionn.conformance import cts
from aionn.errors import InvalidModel
from aionn.hal import DataLocation, Model, Operand, OperandLifeTime, OperandType, Operation, OperationType
from aionn.validation import validate_model

SEED = 20240617

TYPES = [*map(int, OperandType), 0x10001, 99, -1]
OPERATIONS = [*map(int, OperationType), 106, 0x10001, -1]


def _broken_operand(operand: Operand, rng: random.Random) -> Operand:
    shape = operand.dimensions
    shapes = [
        (),
        (0,),
        (1,),
        (2, 3),
        (0,) * 4,
        (1,) * 5,
        shape[::-1],
        shape[:-1],
        (*shape, 1),
        (0,) * len(shape),
    ]
    changes: list[dict[str, Any]] = [
        {"type": rng.choice(TYPES)},
        {"dimensions": rng.choice(shapes)},
        {"scale": rng.choice([0.0, -1.0, 0.5, float("nan")])},
        {"zero_point": rng.choice([0, -1, 128, 255, 256, -129])},
        {"lifetime": rng.choice(list(OperandLifeTime))},
        {
            "location": DataLocation(
                rng.choice([0, 1]), rng.choice([0, 4, 2**32 - 1]), rng.choice([0, 1, 4, 2**31])
            )
        },
        {"lifetime": OperandLifeTime.NO_VALUE, "location": DataLocation()},
        {"lifetime": OperandLifeTime.SUBGRAPH_INPUT, "location": DataLocation()},
    ]
    return msgspec.structs.replace(operand, **rng.choice(changes))


def _broken_operation(operation: Operation, count: int, rng: random.Random) -> Operation:
    inputs, outputs = list(operation.inputs), list(operation.outputs)
    match rng.randrange(7):
        case 0:
            return msgspec.structs.replace(operation, type=rng.choice(OPERATIONS))
        case 1 if inputs:
            inputs.pop(rng.randrange(len(inputs)))
        case 2:
            inputs.insert(rng.randrange(len(inputs) + 1), rng.randrange(count))
        case 3 if outputs:
            outputs.pop()
        case 4:
            outputs.append(rng.randrange(count))
        case 5 if inputs:
            inputs[rng.randrange(len(inputs))] = rng.choice([rng.randrange(count), count, -1])
        case _:
            rng.shuffle(inputs)
    return msgspec.structs.replace(operation, inputs=tuple(inputs), outputs=tuple(outputs))


def _broken(model: Model, rng: random.Random) -> Model:
    operands, operations = list(model.main.operands), list(model.main.operations)
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.5:
            index = rng.randrange(len(operands))
            operands[index] = _broken_operand(operands[index], rng)
        else:
            index = rng.randrange(len(operations))
            operations[index] = _broken_operation(operations[index], len(operands), rng)

    def with_lifetime(lifetime: OperandLifeTime) -> tuple[int, ...]:
        return tuple(i for i, operand in enumerate(operands) if operand.lifetime == lifetime)

    # The lists follow the lifetimes, so that the rules behind those of the interface are reached.
    main = msgspec.structs.replace(
        model.main,
        operands=tuple(operands),
        operations=tuple(operations),
        input_indexes=with_lifetime(OperandLifeTime.SUBGRAPH_INPUT),
        output_indexes=with_lifetime(OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    return msgspec.structs.replace(model, main=main)


def _break(shared: Any, share: float, times: int) -> dict[str, int]:
    rng = random.Random(SEED)
    counts = {"valid": 0, "refused": 0}
    for path in cts.test_files(shared / "cts"):
        for test in cts.load_tests(path):
            if rng.random() > share:
                continue
            model = cts.build_model(test)
            for number in range(times):
                try:
                    validate_model(_broken(model, rng))
                    counts["valid"] += 1
                except InvalidModel:
                    counts["refused"] += 1
                except BaseException as e:
                    e.add_note(f"seed {SEED}, {test.name}, change {number}")
                    raise
            for pool in model.pools:
                pool.close()
    return counts


@pytest.mark.thorough
def test_changed_models_are_valid_or_refused(shared):
    counts = _break(shared, 0.02, 6)
    assert counts["refused"] > 300 and counts["valid"] > 30


@pytest.mark.long
def test_changed_models_are_valid_or_refused_long(shared):
    counts = _break(shared, 1.0, 40)
    assert counts["refused"] > 100_000
