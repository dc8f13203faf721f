"""The ledger of reservations: pure, with the time as an argument."""

import pytest

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.scheduler.admission import SHARE_PPM, SlotCost, StreamTerms
from aionn.scheduler.ledger import RESERVATIONS_MAX, SILENCE_NS, Ledger, ReservableSlot

MS = 1_000_000


def terms(name="cam", period=100, deadline=None, jitter=0):
    deadline = period if deadline is None else deadline
    return StreamTerms(name=name, period_ns=period * MS, deadline_ns=deadline * MS, jitter_ns=jitter * MS)


def cost(duration, piece=0):
    return SlotCost(duration_ns=duration * MS, piece_ns=piece * MS)


def ledger(*names, **settings):
    return Ledger([ReservableSlot(name) for name in names or ("npu/0",)], **settings)


def test_first_slot_that_fits_is_taken_in_the_order_of_the_costs():
    book = ledger("npu/0", "gpu/0")
    costs = {1: cost(60), 0: cost(30)}
    found = [book.admit(terms(f"s{i}"), costs, now_ns=0) for i in range(4)]
    assert [(r.slot_name, r.cost.duration_ns // MS) for r in found] == [("gpu/0", 60), *[("npu/0", 30)] * 3]
    with pytest.raises(NotAdmitted, match=r'stream "s4" on gpu/0: the reserved streams take 0.600'):
        book.admit(terms("s4"), costs, now_ns=0)
    assert book.share_ppm(0) == 900_000 and book.counts()["refused"] == 1


def test_refusal_changes_nothing_and_carries_reason_and_offers():
    book = ledger("npu/0", "gpu/0")
    book.admit(terms("held", 100, 45), {0: cost(40)}, now_ns=0)
    before = book.reservations()
    with pytest.raises(NotAdmitted) as caught:
        book.admit(terms("new", 100, 45), {0: cost(10)}, now_ns=0, elsewhere={1: cost(10)})
    error = caught.value
    assert book.reservations() == before
    assert error.reason.endswith("5 ms too much") and str(error).startswith(error.reason)
    assert error.would_fit.slots == ("gpu/0",) and error.would_fit.deadline_ns == 50 * MS
    assert "It would fit with deadline >= 0.05 s" in str(error)
    with pytest.raises(NotAdmitted):
        book.admit(terms("new", 100, 49), {0: cost(10)}, now_ns=0)
    assert book.admit(terms("new", 100, 50), {0: cost(10)}, now_ns=0).verdict.slack_ns == 0


def test_slot_that_fits_is_found_as_by_an_admission_and_nothing_is_reserved():
    book = ledger("npu/0", "gpu/0")
    costs = {0: cost(40), 1: cost(40)}
    for expected in (0, 0, 1, 1):
        assert book.slot_that_fits(terms(), costs) == expected
        assert book.admit(terms(), costs, now_ns=0).slot == expected
    assert book.slot_that_fits(terms(), costs) is None
    assert book.counts() == {**book.counts(), "admitted": 4, "refused": 0}
    book.withdraw(0)
    assert book.slot_that_fits(terms(), {0: cost(1)}) is None
    with pytest.raises(InvalidArgument):
        book.slot_that_fits(terms(), {2: cost(1)})


def test_whole_frame_blocks_where_the_device_cannot_preempt():
    book = Ledger([ReservableSlot("dsp/0", can_preempt=False)])
    book.admit(terms("long", 200), {0: cost(60, 1)}, now_ns=0)
    with pytest.raises(NotAdmitted, match='operation of "long"'):
        book.admit(terms("short", 200, 60), {0: cost(5, 1)}, now_ns=0)
    book.admit(terms("short", 200, 66), {0: cost(5, 1)}, now_ns=0)


def test_other_frames_of_a_stream_may_run_where_every_deadline_bears_them():
    book = ledger()
    quick = book.admit(terms("quick", 100, 50), {0: cost(30, 20)}, now_ns=0)
    assert book.may_run_lower(quick.number)
    lax = book.admit(terms("lax", 100, 59), {0: cost(10)}, now_ns=0)
    assert not book.may_run_lower(quick.number) and book.may_run_lower(lax.number)
    book.release(lax.number)
    assert book.may_run_lower(quick.number)


def test_best_effort_with_long_operations_is_rejected_beside_reservations():
    book = ledger()
    assert book.allow_lower(0, "enhance", 5 * MS)
    book.admit(terms("cam", 100, 20), {0: cost(10)}, now_ns=0)
    assert not book.allow_lower(0, "segment", 11 * MS)
    assert not book.allow_lower(0, "enhance", 11 * MS)
    assert book.allow_lower(0, "segment", 10 * MS)
    with pytest.raises(NotAdmitted, match='operation of "segment"'):
        book.admit(terms("cam2", 100, 19), {0: cost(1)}, now_ns=0)
    book.forget_lower(0, "segment")
    book.admit(terms("cam2", 100, 19), {0: cost(1)}, now_ns=0)


def test_client_holds_no_more_than_its_quota():
    book = ledger("a", "b", quota_ppm=500_000)
    book.admit(terms("one"), {0: cost(40)}, now_ns=0, client="greedy")
    with pytest.raises(
        NotAdmitted,
        match=r'the streams of this process \("one"\) hold a share of 0.400 of a slot and may hold 0.500',
    ):
        book.admit(terms("two"), {0: cost(20), 1: cost(20)}, now_ns=0, client="greedy")
    # A slot on which it takes less is within the quota.
    assert book.admit(terms("two"), {0: cost(20), 1: cost(10)}, now_ns=0, client="greedy").slot == 1
    book.admit(terms("other"), {0: cost(40)}, now_ns=0, client="modest")
    assert book.client_ppm("greedy") == 500_000


def test_number_of_reservations_is_bounded():
    book = ledger()
    tiny = SlotCost(duration_ns=1, piece_ns=0)
    book._held[0].update({-i: book.admit(terms(f"s{i}"), {0: tiny}, now_ns=0) for i in range(3)})
    book._held[0].update({-i: book._held[0][1] for i in range(3, RESERVATIONS_MAX)})
    with pytest.raises(NotAdmitted, match=f"{RESERVATIONS_MAX} reservations exist already"):
        book.admit(terms("more"), {0: tiny}, now_ns=0)


def test_change_is_admitted_beside_the_old_one():
    book = ledger()
    old = book.admit(terms("cam", 100), {0: cost(30)}, now_ns=0)
    new = book.change(old.number, terms("cam", 50), {0: cost(30)}, now_ns=5)
    assert new.number != old.number and book.share_ppm(0) == 900_000
    assert book.release(old.number) == old and book.share_ppm(0) == 600_000
    with pytest.raises(NotAdmitted):
        book.change(new.number, terms("cam", 40), {0: cost(30)}, now_ns=5)
    assert book.reservations() == (new,)


def test_change_to_less_needs_no_room():
    book = ledger()
    old = book.admit(terms("cam", 50), {0: cost(40)}, now_ns=0, client="c")
    new = book.change(old.number, terms("cam", 100), {0: cost(40)}, now_ns=9)
    assert (new.number, new.client, new.admitted_ns) == (old.number, "c", 0)
    assert book.share_ppm(0) == 400_000 and new.verdict.share_ppm == 400_000
    # A shorter deadline is more, though the share is less: it needs room beside the old one.
    assert book.change(new.number, terms("cam", 200, 70), {0: cost(40)}, now_ns=9).number != new.number
    assert book.share_ppm(0) == 600_000


def test_slot_that_dies_withdraws_its_reservations_and_takes_no_others_until_it_is_back():
    book = ledger("npu/0", "gpu/0")
    gone = [book.admit(terms(f"s{i}"), {0: cost(5)}, now_ns=0) for i in range(10)]
    kept = book.admit(terms("kept"), {1: cost(5)}, now_ns=0)
    assert list(book.withdraw(0)) == gone and book.reservations() == (kept,)
    assert book.counts()["withdrawn"] == 10 and book.withdraw(0) == ()
    # The other slot takes them as far as they fit; the dead one none.
    assert all(book.admit(r.terms, {0: cost(5), 1: cost(9)}, now_ns=1).slot == 1 for r in gone)
    with pytest.raises(NotAdmitted, match="all slots that could run it are down"):
        book.admit(terms("late"), {0: cost(5)}, now_ns=1)
    book.restore(0)
    assert book.admit(terms("late"), {0: cost(5)}, now_ns=1).slot == 0


def test_client_that_reserves_and_sends_nothing_loses_its_reservations():
    book = ledger()
    silent = book.admit(terms("silent"), {0: cost(50)}, now_ns=0, client="mute")
    lively = book.admit(terms("lively"), {0: cost(40)}, now_ns=0)
    book.seen(lively.number, SILENCE_NS // 2)
    assert book.silent_at_ns() == SILENCE_NS
    assert book.end_silent(SILENCE_NS - 1) == ()
    assert book.end_silent(SILENCE_NS) == (silent,)
    assert book.reservations() == (lively,) and book.counts() == {
        "admitted": 2, "refused": 0, "released": 0, "withdrawn": 0, "silent": 1,
    }  # fmt: skip
    assert book.silent_at_ns() == SILENCE_NS // 2 + SILENCE_NS


def test_client_that_is_gone_holds_nothing():
    book = ledger()
    book.admit(terms("a"), {0: cost(10)}, now_ns=0, client="gone")
    kept = book.admit(terms("b"), {0: cost(10)}, now_ns=0, client="here")
    assert len(book.release_client("gone")) == 1 and book.reservations() == (kept,)
    assert book.release(kept.number) == kept and book.release(kept.number) is None
    book.seen(kept.number, 5)
    assert book.silent_at_ns() is None


def test_mistakes_are_invalid_arguments():
    book = ledger()
    for costs in ({}, {1: cost(5)}, {-1: cost(5)}):
        with pytest.raises(InvalidArgument):
            book.admit(terms(), costs, now_ns=0)
    with pytest.raises(InvalidArgument, match="there is no reservation 7"):
        book.change(7, terms(), {0: cost(5)}, now_ns=0)
    with pytest.raises(InvalidArgument, match="cap_ppm"):
        Ledger([ReservableSlot("a", cap_ppm=SHARE_PPM + 1)])
    with pytest.raises(InvalidArgument, match="quota_ppm"):
        ledger(quota_ppm=-1)


def test_reservation_gives_a_server_with_its_terms():
    found = ledger().admit(terms("cam", 100, 50, 4), {0: cost(10, 2)}, now_ns=0)
    server = found.server()
    assert (server.slot, server.period_ns, server.deadline_ns) == (0, 100 * MS, 50 * MS)
    assert (server.jitter_ns, server.duration_ns, server.number) == (4 * MS, 10 * MS, found.number)
