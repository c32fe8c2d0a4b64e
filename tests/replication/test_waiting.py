"""What notes bid everybody, and what they are worth in another world: values only."""

import json
from dataclasses import replace

import pytest

from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.store import Stat
from replication.cluster import ClusterView
from replication.ledger_record import BINDING_MAX_MS, ClusterFingerprint, WaitingNote
from replication.orders import DrainOrder, LimitsOrder, MaintenanceWindow, Orders
from replication.reasons import Reason, whereabouts
from tests.replication.ledger_values import B1, B2, B3

WORLD = ClusterFingerprint(newest_czxid=7, bookies="b", orders="o")
BETTER = replace(WORLD, newest_czxid=8)
NOTE = WaitingNote(
    ledger_id=5,
    reason=Reason.NO_TARGET,
    detail="nobody has room",
    node="host-a",
    since_ms=1,
    tries=3,
    next_try_ms=1_000,
    fingerprint=WORLD,
    suspects=frozenset({B1, B2}),
)

# --- Notes ----------------------------------------------------------------------------------------


def test_a_note_from_a_mad_clock_binds_for_a_day_after_it_was_written() -> None:
    note = replace(NOTE, next_try_ms=10**15, written_ms=1_000)

    assert note.wait_ms(now_ms=1_000, fingerprint=WORLD) == BINDING_MAX_MS
    assert note.wait_ms(now_ms=1_000 + BINDING_MAX_MS, fingerprint=WORLD) == 0


@pytest.mark.parametrize(
    ("note", "now_ms", "fingerprint", "wait_ms"),
    [
        pytest.param(NOTE, 400, WORLD, 600, id="until its time"),
        pytest.param(NOTE, 1_000, WORLD, 0, id="its time has come"),
        pytest.param(NOTE, 400, BETTER, 0, id="a better world"),
        pytest.param(
            replace(NOTE, reason=Reason.LEFT_TO_OTHERS),
            400,
            WORLD,
            0,
            id="it bound its writer only",
        ),
        pytest.param(replace(NOTE, fingerprint=None), 400, WORLD, 0, id="of the first releases"),
        pytest.param(
            replace(NOTE, next_try_ms=10**15), 0, WORLD, BINDING_MAX_MS, id="from a mad clock"
        ),
    ],
)
def test_how_long_a_note_binds(
    note: WaitingNote, now_ms: int, fingerprint: ClusterFingerprint, wait_ms: int
) -> None:
    assert note.wait_ms(now_ms=now_ms, fingerprint=fingerprint) == wait_ms


GRACE = replace(NOTE, reason=Reason.OPEN_LEDGER_GRACE, grace_until_ms=900)


@pytest.mark.parametrize(
    ("note", "fingerprint", "is_overtaken"),
    [
        pytest.param(NOTE, WORLD, False, id="all is as it was"),
        pytest.param(NOTE, BETTER, True, id="a bookie came"),
        pytest.param(replace(NOTE, fingerprint=None), BETTER, False, id="of the first releases"),
        pytest.param(replace(NOTE, reason=Reason.JOURNAL), BETTER, False, id="no bookie helps"),
        pytest.param(GRACE, BETTER, False, id="its grace goes on all the same"),
        pytest.param(replace(GRACE, reason=Reason.NO_COVERAGE), BETTER, True, id="it may end"),
        pytest.param(replace(GRACE, grace_until_ms=400), BETTER, True, id="its grace is over"),
    ],
)
def test_what_a_note_tells_may_have_changed_since(
    note: WaitingNote, fingerprint: ClusterFingerprint, is_overtaken: bool
) -> None:
    assert note.is_overtaken(now_ms=400, fingerprint=fingerprint) is is_overtaken


@pytest.mark.parametrize(
    ("note", "reason", "fingerprint", "tries"),
    [
        pytest.param(NOTE, Reason.NO_TARGET, WORLD, 3, id="alike"),
        pytest.param(NOTE, Reason.NO_COPY, WORLD, 0, id="another reason"),
        pytest.param(NOTE, Reason.NO_TARGET, BETTER, 0, id="a better world"),
        pytest.param(
            replace(NOTE, fingerprint=None), Reason.NO_TARGET, WORLD, 0, id="first releases"
        ),
    ],
)
def test_tries_are_counted_while_they_fail_alike(
    note: WaitingNote, reason: Reason, fingerprint: ClusterFingerprint, tries: int
) -> None:
    assert note.tries_for(reason, fingerprint=fingerprint) == tries


def test_a_note_is_read_as_it_was_written() -> None:
    assert WaitingNote.from_record(5, json.loads(NOTE.to_json())) == NOTE


def test_the_first_release_reads_what_it_wrote_itself_in_a_note_of_ours() -> None:
    record = json.loads(NOTE.to_json())

    assert {key: record[key] for key in ("ledger_id", "reason", "detail", "node", "since_ms")} == {
        "ledger_id": 5,
        "reason": "no-target",
        "detail": "nobody has room",
        "node": "host-a",
        "since_ms": 1,
    }


def test_a_note_of_the_first_release_is_read_and_binds_nobody() -> None:
    record = {"version": 1, "reason": "no-copy", "detail": "d", "node": "n", "since_ms": 4}

    note = WaitingNote.from_record(5, record)

    assert (note.tries, note.next_try_ms, note.fingerprint, note.suspects) == (
        1,
        0,
        None,
        frozenset(),
    )


def test_names_that_we_do_not_know_are_passed_over() -> None:
    record = {**json.loads(NOTE.to_json()), "version": 3, "colour": "red"}

    assert WaitingNote.from_record(5, record) == NOTE


# --- The world ------------------------------------------------------------------------------------


def registered(**czxids: int) -> BookieView:
    bookies = {BookieId(f"{name}:3181"): czxid for name, czxid in czxids.items()}
    return BookieView(
        writable={
            bookie: RegisteredBookie(bookie_id=bookie, czxid=czxid, address=None, is_writable=True)
            for bookie, czxid in bookies.items()
        }
    )


def view(*, draining: bool = False, **czxids: int) -> ClusterView:
    orders = Orders(draining={B1: DrainOrder(since_ms=1)} if draining else {})
    return ClusterView(bookies=registered(**czxids), orders=orders)


@pytest.mark.compat("G13", verdict="better")
@pytest.mark.parametrize(
    ("then", "now", "reason", "has_improved"),
    [
        pytest.param(view(a=1, b=2), view(a=1, b=2), Reason.NO_COPY, False, id="the same"),
        pytest.param(view(a=1), view(a=1, b=2), Reason.NO_COPY, True, id="a bookie came"),
        pytest.param(view(a=1, b=2), view(a=3, b=2), Reason.NO_COPY, True, id="one came back"),
        pytest.param(view(a=1, b=2), view(b=2), Reason.NO_TARGET, False, id="one went"),
        pytest.param(view(a=1, b=2), view(a=1), Reason.NO_TARGET, False, id="the newest went"),
        pytest.param(view(a=1, b=2), view(b=2), Reason.NO_COPY, True, id="one of its rest went"),
        pytest.param(view(a=1, b=2), view(b=2), Reason.MAINTENANCE, True, id="and another is away"),
        pytest.param(view(a=1, b=2), view(a=1), Reason.NO_ANSWER, True, id="the silent one went"),
        pytest.param(view(a=1, b=2), view(a=1, c=3), Reason.NO_COPY, True, id="one for another"),
        pytest.param(view(a=1, draining=True), view(a=1), Reason.NO_TARGET, True, id="order over"),
        pytest.param(view(), view(), Reason.NO_COPY, False, id="nobody is there"),
    ],
)
def test_a_world_improves_when_a_bookie_comes_or_an_order_changes(
    then: ClusterView, now: ClusterView, reason: Reason, has_improved: bool
) -> None:
    assert (
        ClusterFingerprint.of(now).warrants_retry(ClusterFingerprint.of(then), reason)
        is has_improved
    )


@pytest.mark.parametrize(
    ("orders", "is_another"),
    [
        pytest.param(Orders(), False, id="none"),
        pytest.param(
            Orders(limits=LimitsOrder(bytes_per_s=1)), False, id="limits are in no one's way"
        ),
        pytest.param(
            Orders(maintenance={B2: MaintenanceWindow(since_ms=1, until_ms=9)}), True, id="a window"
        ),
        pytest.param(Orders(draining={B2: DrainOrder(since_ms=1)}), True, id="a drain"),
    ],
)
def test_orders_that_may_be_in_the_way_belong_to_the_world(
    orders: Orders, is_another: bool
) -> None:
    assert (
        ClusterFingerprint.of(replace(view(a=1), orders=orders)) != ClusterFingerprint.of(view(a=1))
    ) is is_another


# --- Whereabouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bookies", "told"),
    [
        pytest.param([], "", id="nobody named"),
        pytest.param([B1], "", id="there"),
        pytest.param([B2, B1], f"away, and wanted back: {B2}", id="away"),
        pytest.param([B3], f"gone for good (without a cookie): {B3}", id="gone"),
        pytest.param(
            [B3, B2],
            f"away, and wanted back: {B2}; gone for good (without a cookie): {B3}",
            id="one of each",
        ),
    ],
)
def test_who_is_away_and_who_is_gone_are_told_apart(bookies: list[BookieId], told: str) -> None:
    stat = Stat(version=0)
    bookies_seen = registered(**{B1.partition(":")[0]: 1})
    assert B1 in bookies_seen.available
    seen = ClusterView(bookies=bookies_seen, cookies={B1: stat, B2: stat})

    assert whereabouts(bookies, seen) == told
