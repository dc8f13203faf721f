"""Plans of capacity: what fits, what limits it, and whether it holds in virtual time."""

import json
import random

import msgspec
import pytest

from aionn.cli.main import main
from aionn.drivers.simulated.profiles import PROFILES, operation_durations_ns, unsupported_reason
from aionn.errors import InvalidArgument
from aionn.scheduler.admission import SHARE_PPM, Demand, Piece, SlotCost, SlotTest, StreamTerms
from aionn.simulation.capacity import capacity_page, copies_that_fit, phase_rows, plan_capacity, verify
from aionn.simulation.scenario import prepare
from aionn.simulation.workload import READY_MODELS, workload_from_text
from tests.simulation.test_simulate import Page

MS = 1_000_000
TEXT = """
name = "gates"
duration_s = 1.0
devices = ["lane"]
[[device]]
name = "lane"
slots = SLOTS
rates = {int8 = 1e9}
memory_bandwidth = 1e9
[[model]]
name = "cam"
operations = 10
arithmetic = 4e6
data_type = "int8"
[[model]]
name = "long"
operations = 4
arithmetic = 8e6
data_type = "int8"
"""
STREAM = """
[[stream]]
name = "NAME"
model = "cam"
rate_per_s = 30
deadline_s = DEADLINE
guarantee = true
"""
BEST_EFFORT = """
[[stream]]
name = "search"
model = "long"
rate_per_s = 30
priority = "low"
"""


def text_of(count, *, slots=1, deadline="0.0333", more=""):
    streams = [STREAM.replace("NAME", f"c{i}").replace("DEADLINE", deadline) for i in range(count)]
    return TEXT.replace("SLOTS", str(slots)) + "".join(streams) + more


def plan_of(*arguments, **settings):
    scenario = prepare(workload_from_text(text_of(*arguments, **settings)), 1)
    return scenario, plan_capacity(scenario)


def test_event_loop_is_a_part_of_the_plan_where_its_time_is_stated():
    """Seven frames of 4 ms fit without it; with a millisecond each on the loop, six do, and ten on two slots."""
    stated = text_of(16).replace("[[device]]", "loop_s = 0.001\n[[device]]", 1)
    for text, placed, admitted in (
        (text_of(16), 7, 7),
        (stated, 6, 6),
        (stated.replace("slots = 1", "slots = 2"), 10, 6),
    ):
        found = plan_capacity(prepare(workload_from_text(text), 1))
        assert sum(len(slot.streams) for slot in found.slots) == placed
        assert found.fits[0].admitted == admitted
        assert ("event loop" in found.refusals[0].reason) == (placed != 7)
    with pytest.raises(InvalidArgument, match="loop_s: expected seconds from 0 to 1"):
        workload_from_text(stated.replace("0.001", "2.0"))


def test_equal_streams_have_a_closed_form():
    source = random.Random(4)
    for _ in range(60):
        period, piece = source.randrange(5 * MS, 60 * MS), source.randrange(3 * MS)
        deadline = int(period * source.uniform(0.3, 1.5))
        terms = StreamTerms(
            name="s", period_ns=period, deadline_ns=deadline, jitter_ns=source.choice((0, deadline // 5))
        )
        duration = source.randrange(MS // 2, 12 * MS)
        new = Demand(terms, SlotCost(duration_ns=duration, piece_ns=source.randrange(duration)))
        cap_ppm = source.choice((800_000, 950_000, SHARE_PPM))
        held = []
        while SlotTest(held, cap_ppm=cap_ppm, lower=[Piece("low", piece)]).verdict(new).fits:
            held.append(new)
        assert copies_that_fit(terms, new.cost, cap_ppm=cap_ppm, lower_ns=piece) == len(held)


def test_streams_are_spread_over_slots_until_none_has_room():
    scenario, plan = plan_of(15, slots=2)
    assert [len(slot.streams) for slot in plan.slots] == [7, 7]
    (refused,) = plan.refusals
    assert refused.reason.startswith('stream "c14" on lane/0: the reserved streams take 0.84')
    assert refused.cheapest == "27.5 frames/s instead of 30"
    assert all(not run.lost and run.frames > 100 for run in verify(scenario, plan))


def test_best_effort_that_blocks_is_named():
    _, plan = plan_of(2, deadline="0.010", more=BEST_EFFORT)
    (slot,) = plan.slots
    assert (slot.blocker, slot.slack_ms, slot.at_ms) == ("long", 0.0, 10.0)
    _, plan = plan_of(3, deadline="0.013", more=BEST_EFFORT)
    assert plan.refusals[0].cheapest == "a deadline of 14 ms instead of 13 ms"


def test_wish_without_a_guarantee_is_a_mistake():
    with pytest.raises(InvalidArgument, match="expected a stream with guarantee = true"):
        plan_of(0, more=BEST_EFFORT)


def test_plan_of_ready_devices_sells_what_the_time_suffices_for():
    """With the period as deadline, all of the share is sold; with half of it, half of what spread phases could have."""
    whole, halves = [], []
    for profile in PROFILES.values():
        for model in READY_MODELS.values():
            cost = model.cost(None)
            if unsupported_reason(profile, cost) is not None:
                continue
            duration = sum(operation_durations_ns(profile, cost))
            found = SlotCost(duration_ns=duration, piece_ns=0)
            fluid = 33_333_333 // duration
            if not fluid:
                continue
            terms = StreamTerms(name="s", period_ns=33_333_333, deadline_ns=33_333_333)
            whole.append(copies_that_fit(terms, found, cap_ppm=SHARE_PPM) / fluid)
            half = copies_that_fit(
                msgspec.structs.replace(terms, deadline_ns=16_666_666), found, cap_ppm=SHARE_PPM
            )
            if half:
                halves.append(fluid / half)
    assert len(whole) > 30 and set(whole) == {1.0}
    assert len(halves) > 25 and min(halves) >= 1.9


def test_large_plan_takes_little_time():
    source = random.Random(2)
    more = "".join(
        STREAM.replace("NAME", f"s{i}").replace("DEADLINE", f"{source.uniform(0.02, 0.033):.6f}")
        for i in range(200)
    )
    text = (TEXT.replace("SLOTS", "16") + more).replace("arithmetic = 4e6", "arithmetic = 2e6")
    plan = plan_capacity(prepare(workload_from_text(text), 1))
    assert sum(len(slot.streams) for slot in plan.slots) == 200 - len(plan.refusals) > 150
    assert plan.decided_ms < 10_000, "a watchdog; a second is the goal on a machine with nothing else to do"


def run(tmp_path, capsys, *arguments, text):
    path = tmp_path / "gates.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(path), *map(str, arguments)])
    return caught.value.code, capsys.readouterr()


def test_command_prints_the_plan_and_writes_its_page(tmp_path, capsys):
    page_path = tmp_path / "plan.html"
    text = text_of(8, deadline="0.0165")
    code, printed = run(tmp_path, capsys, "--verify", "--html", page_path, text=text)
    assert code == 1 and "4 of 8 streams fit" in printed.out
    assert "at t = 16.5 ms the reserved streams need 16 ms, this one 4 ms more" in printed.out
    assert "cheapest change: a deadline of 20 ms instead of 16.5 ms" in printed.out
    page = Page()
    page.feed(page_path.read_text())
    assert page.open == [] and page.drawings == 1 and page.tags["polyline"] == 3
    code, printed = run(tmp_path, capsys, "--deadline", 0.033, text=text)
    assert code == 1 and "7 of 8 streams fit" in printed.out
    code, printed = run(tmp_path, capsys, "--deadline", 0.033, "--fps", 20, "--json", "--verify", text=text)
    found = json.loads(printed.out)
    assert code == 0 and len(found["slots"][0]["streams"]) == 8
    assert found["fits"][0]["admitted"] == 8 and all(run["lost"] == 0 for run in found["verified"])


def test_command_reports_mistakes_in_a_sentence(tmp_path, capsys):
    code, printed = run(tmp_path, capsys, text=text_of(0, more=BEST_EFFORT))
    assert code == 2 and "expected a stream with guarantee = true" in printed.err
    code, printed = run(tmp_path, capsys, "--fps", 0, text=text_of(1))
    assert code == 2 and "fps" in printed.err


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.tflite", b"\x1c\0\0\0TFL3\xff\xfe", "got a model; a workload names the file of a model"),
        ("m.ONNX", b"text", "got a model"),
        ("m.bin", b"\xff\xfe\0", "got a file that is not text"),
    ],
)
def test_file_that_is_no_workload_is_refused_in_a_sentence(command, name, content, said, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main([command, str(path)])
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and f"{name}: expected a workload as TOML text, {said}" in " ".join(
        printed.split()
    )
    assert "codec" not in printed and "Traceback" not in printed


def test_page_of_an_empty_plan_is_a_page():
    _, plan = plan_of(1, deadline="0.003")
    page = Page()
    page.feed(capacity_page("gates", plan, []))
    assert page.open == [] and page.drawings == 0


def phased(count, *, phase=None, deadline="0.0167"):
    text = text_of(count, deadline=deadline).replace("guarantee = true", 'guarantee = "phased"')
    return text if phase is None else text.replace("rate_per_s = 30", f"rate_per_s = 30\nphase_s = {phase}")


def test_plan_chooses_phases_and_loses_no_frame_in_any_phasing():
    scenario = prepare(workload_from_text(phased(8)), 1)
    found = plan_capacity(scenario)
    plain = plan_of(8, deadline="0.0167")[1]
    assert (len(found.reservations), len(plain.reservations)) == (7, 4), "95 % of a slot have time for seven"
    assert "may be reserved" in found.refusals[0].reason
    rows = phase_rows(found)
    assert len({row[3] for row in rows}) == 7 and all(0 <= row[3] < 33.4 for row in rows)
    for run in verify(scenario, found):
        assert (run.lost, run.labelled, run.unexplained) == (0, 0, 0) and run.frames > 40
    assert "Phases" in capacity_page("gates", found, [])


def test_stated_phases_are_kept_and_a_refusal_offers_another():
    scenario = prepare(workload_from_text(phased(2, phase=0.005, deadline="0.0055")), 1)
    found = plan_capacity(scenario)
    assert [row[3] for row in phase_rows(found)] == [5.0]
    assert "captures" in found.refusals[0].cheapest and "later" in found.refusals[0].cheapest


def test_plan_command_shows_the_phases(tmp_path, capsys):
    (path := tmp_path / "gates.toml").write_text(phased(3))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path), "--json", "--verify"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["stream"] for row in printed["phases"]] == ["c0", "c1", "c2"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path)])
    assert ended.value.code == 0
    assert "tolerance ms" in capsys.readouterr().out
