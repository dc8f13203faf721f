"""Workload files: what they mean, and how a mistake is told."""

import itertools
import statistics

import pytest

from aionn.drivers.simulated.profiles import PROFILES
from aionn.errors import InvalidArgument
from aionn.simulation.workload import (
    devices_of,
    durations_of,
    generate,
    read_trace,
    read_workload,
    workload_from_text,
)

TEXT = """\
name = "small"
duration_s = 10.0
devices = "edge"

[[model]]
name = "own"
operations = 4
arithmetic = 4e9
data_type = "int8"

[[stream]]
name = "first"
model = "own"
rate_per_s = 50
deadline_s = 0.1

[[stream]]
name = "second"
model = "keyword-int8"
priority = "high"
arrivals = "poisson"
rate_per_s = 20
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ("rate_per_s = 50", "rate_per_s = -1", 14, "stream[0].rate_per_s"),
        ("rate_per_s = 20", "rate_per_s = 'many'", 22, "stream[1].rate_per_s"),
        ('priority = "high"', 'priority = "urgent"', 20, "stream[1].priority"),
        ("deadline_s = 0.1", "deadlines = 0.1", 15, "stream[0].deadlines"),
        ("deadline_s = 0.1", "deadline_s = -0.1", 15, "stream[0].deadline_s"),
        ("operations = 4", "operations = 0", 7, "model[0].operations"),
        ("duration_s = 10.0", "duration_s = 0", 2, "duration_s"),
        ('devices = "edge"', 'devices = "moon"', 3, "devices"),
        ('model = "own"', 'model = "nobody"', 13, "stream.0.model"),
        ('name = "second"', 'name = "first"', 18, "stream.1.name"),
        ('arrivals = "poisson"', 'arrivals = "trace"', 21, "stream[1]"),
        ('arrivals = "poisson"', 'after = "nobody"', 21, "stream.1.after"),
    ],
)
def test_mistake_is_told_with_line_and_field(old, new, line, field):
    with pytest.raises(InvalidArgument) as caught:
        workload_from_text(TEXT.replace(old, new), where="small.toml")
    message = str(caught.value)
    shown = field.replace(".0.", "[0].").replace(".1.", "[1].")
    assert message.startswith("small.toml, line ") and shown in message, message
    if "trace" not in new:
        assert f"line {line}," in message, message


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            'name = "first"',
            'name = "first"\nmodle = 1',
            "stream[0].modle: expected one of name, model, priority, ",
        ),
        ('name = "first"', 'name = "first"\nmodle = 1', "; got modle; did you mean model?"),
        (
            "duration_s",
            "build-system = 1\nduration_s",
            ", build-system: expected one of name, duration_s, devices, ",
        ),
        ("duration_s", "build-system = 1\nduration_s", ", cap, loop_s; got build-system"),
    ],
)
def test_unknown_field_is_told_with_those_that_there_are(old, new, told):
    with pytest.raises(InvalidArgument) as caught:
        workload_from_text(TEXT.replace(old, new, 1), where="small.toml")
    assert told in str(caught.value) and "`" not in str(caught.value)


def test_text_that_is_no_toml_is_told_with_its_line():
    with pytest.raises(InvalidArgument, match=r"no TOML: .*line 3"):
        workload_from_text('name = "x"\nduration_s = 1\n[[stream\n')


def test_toml_of_any_depth_is_rejected():
    with pytest.raises(InvalidArgument, match=r"deep\.toml: no TOML"):
        workload_from_text("a = " + "[" * 5000, where="deep.toml")


def test_missing_file_and_missing_field_are_told(tmp_path):
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_workload(tmp_path / "nothing.toml")
    (tmp_path / "w.toml").write_text('name = "x"\nduration_s = 1.0\n')
    with pytest.raises(InvalidArgument, match="file: expected the field stream, which is missing"):
        read_workload(tmp_path / "w.toml")


def test_model_that_no_device_runs_is_told():
    workload = workload_from_text(
        TEXT.replace('devices = "edge"', 'devices = ["phone-dsp"]').replace(
            'model = "own"', 'model = "text-float"'
        )
    )
    with pytest.raises(InvalidArgument, match="stream first: no device can run model text-float"):
        durations_of(workload, devices_of(workload))


def test_arrivals_have_the_rate_asked_for():
    arrivals = generate(workload_from_text(TEXT), 1)
    assert [a.at_ns for a in arrivals] == sorted(a.at_ns for a in arrivals)
    first = [a for a in arrivals if a.stream_index == 0]
    assert len(first) == 500
    gaps = {b.at_ns - a.at_ns for a, b in itertools.pairwise(first)}
    assert max(gaps) - min(gaps) <= 1 and all(a.deadline_ns == a.at_ns + 100_000_000 for a in first)
    assert 140 < len(arrivals) - len(first) < 260


def test_gamma_gaps_have_the_variation_asked_for():
    text = TEXT.replace('arrivals = "poisson"', 'arrivals = "gamma"\ncv = 4.0').replace(
        "duration_s = 10.0", "duration_s = 1000.0"
    )
    times = [a.at_ns for a in generate(workload_from_text(text), 1) if a.stream_index == 1]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(4.0, rel=0.1)


def test_streams_draw_independently():
    alone = TEXT[: TEXT.index("[[stream]]")] + TEXT[TEXT.rindex("[[stream]]") :]
    both = [a.at_ns for a in generate(workload_from_text(TEXT), 5) if a.stream_index == 1]
    assert both == [a.at_ns for a in generate(workload_from_text(alone), 5)]


def test_followers_stand_behind_what_they_follow():
    text = (
        TEXT
        + 'deadline_s = 0.2\n[[stream]]\nname = "third"\nmodel = "own"\nafter = "second"\ndeadline_s = 0.3\n'
    )
    arrivals = generate(workload_from_text(text), 1)
    followers = [(n, a) for n, a in enumerate(arrivals) if a.stream_index == 2]
    assert followers
    for number, follower in followers:
        before = arrivals[follower.after_index]
        assert follower.after_index < number and before.stream_index == 1
        assert follower.deadline_ns == before.at_ns + 300_000_000


def test_trace_is_scaled_to_the_rate(tmp_path):
    rows = "".join(f"2023-11-16 18:17:{second:02}.5000000,1\n" for second in range(0, 60, 2))
    (tmp_path / "t.csv").write_text("TIMESTAMP,Tokens\n" + rows)
    assert read_trace(tmp_path / "t.csv")[:3] == [0.0, 2.0, 4.0]
    text = TEXT.replace('arrivals = "poisson"', 'arrivals = "trace"\ntrace = "t.csv"')
    arrivals = generate(workload_from_text(text), 1, folder=tmp_path)
    assert sum(a.stream_index == 1 for a in arrivals) == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("A,B\n1,2\n", "line 1, TIMESTAMP"),
        ("TIMESTAMP\n1.0\nyesterday\n", "line 3, TIMESTAMP: expected a date or seconds, got 'yesterday'"),
        ("TIMESTAMP\n1.0\n", "two arrivals or more"),
    ],
)
def test_wrong_trace_is_told(tmp_path, content, told):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(InvalidArgument, match=told):
        read_trace(tmp_path / "t.csv")


def test_recorded_traces_have_the_variation_that_is_told_of_them(shared):
    for name, cv in (("code", 13.2), ("conv", 1.09)):
        times = read_trace(shared / "traces" / f"AzureLLMInferenceTrace_{name}.csv")
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.02)


def test_device_of_a_file_is_read(tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nmemory_bandwidth = 1e9\n[rates]\nint8 = 1e9\n')
    workload = workload_from_text(TEXT.replace('devices = "edge"', 'devices = ["mine.toml", "edge-cpu"]'))
    assert [d.name for d in devices_of(workload, folder=tmp_path)] == ["mine", "edge-cpu"]
    assert PROFILES["edge-cpu"].slots == 2
