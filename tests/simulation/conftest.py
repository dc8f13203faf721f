"""Workloads drawn from a seed, for runs that are judged by checkers."""

import random

import pytest

from aionn.drivers.simulated.profiles import ClockRamp, DeviceProfile, FailureRates
from aionn.simulation.workload import READY_MODELS, Stream, Workload


def _device(source, index, *, with_faults):
    rates = {"int8": source.uniform(50e9, 2e12)}
    for data_type in ("float16", "float32"):
        if index == 0 or source.random() < 0.5:
            rates[data_type] = source.uniform(50e9, 8e11)
    settings = {}
    if with_faults:
        settings["noise"] = source.choice((0.0, 0.1, 0.5))
        settings["clock"] = source.choice((ClockRamp(), ClockRamp(0.4, 5_000_000, 10_000_000)))
        settings["failures"] = FailureRates(
            transient=source.choice((0.0, 0.05)),
            persistent=source.choice((0.0, 0.02)),
            hang=source.choice((0.0, 0.01)),
            death=source.choice((0.0, 0.02)),
        )
    return DeviceProfile(
        name=f"device{index}",
        slots=source.choice((1, 1, 2)),
        rates=rates,
        memory_bandwidth=source.uniform(5e9, 50e9),
        operation_overhead_ns=source.randrange(0, 20_000),
        launch_overhead_ns=source.randrange(0, 300_000),
        preemption=source.choice(("between_operations", "between_operations", "none")),
        **settings,
    )


def _stream(source, index, names):
    after = source.choice(names) if names and source.random() < 0.2 else None
    return Stream(
        name=f"stream{index}",
        model=source.choice(sorted(READY_MODELS)),
        priority=source.choice(("low", "medium", "high")),
        arrivals=source.choice(("periodic", "poisson", "gamma")),
        rate_per_s=source.uniform(5, 120),
        cv=source.choice((1.0, 4.0)),
        jitter_s=source.choice((0.0, 0.003)),
        deadline_s=source.choice((None, 0.002, 0.02, 0.1, 0.5)),
        after=after,
        burst=source.choice((1, 1, 1, 5)),
    )


@pytest.fixture(scope="session")
def draw_workload():
    """A function from a seed to a workload, with faults or without."""

    def draw(seed, *, with_faults):
        source = random.Random(f"workload/{seed}")
        devices = tuple(_device(source, i, with_faults=with_faults) for i in range(source.randrange(1, 4)))
        streams = []
        for index in range(source.randrange(1, 6)):
            streams.append(_stream(source, index, [stream.name for stream in streams]))
        return Workload(
            name=f"drawn-{seed}",
            duration_s=source.uniform(0.2, 0.8),
            devices=tuple(device.name for device in devices),
            stream=tuple(streams),
            device=devices,
        )

    return draw
