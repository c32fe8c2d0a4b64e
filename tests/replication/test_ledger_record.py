"""Notes of deferred ledgers, and when an improved cluster overrides them: values only."""

import json
from dataclasses import replace

import pytest

from ledgers.errors import CorruptionError
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.store import Stat
from replication.cluster import ClusterView
from replication.ledger_record import BINDING_MAX_MS, ClusterFingerprint, WaitingNote
from replication.orders import DrainOrder, LimitsOrder, MaintenanceWindow, Orders
from replication.reasons import Blocked, Exclusion, Facts, Reason, absence_facts
from tests.replication.ledger_values import B1, B2, B3

FINGERPRINT = ClusterFingerprint(newest_czxid=7, bookies="b", orders="o")
BETTER = replace(FINGERPRINT, newest_czxid=8)
NOTE = WaitingNote(
    ledger_id=5,
    blocked=Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("no bookie has space",))),
    node="host-a",
    since_ms=1,
    tries=3,
    next_try_ms=1_000,
    fingerprint=FINGERPRINT,
    suspects=frozenset({B1, B2}),
)

# --- Notes ----------------------------------------------------------------------------------------


def test_a_note_from_a_wrong_clock_counts_for_a_day_at_most() -> None:
    note = replace(NOTE, next_try_ms=10**15, written_ms=1_000)

    assert note.wait_ms(now_ms=1_000, fingerprint=FINGERPRINT) == BINDING_MAX_MS
    assert note.wait_ms(now_ms=1_000 + BINDING_MAX_MS, fingerprint=FINGERPRINT) == 0


@pytest.mark.parametrize(
    ("note", "now_ms", "fingerprint", "wait_ms"),
    [
        pytest.param(NOTE, 400, FINGERPRINT, 600, id="until its time"),
        pytest.param(NOTE, 1_000, FINGERPRINT, 0, id="its time has come"),
        pytest.param(NOTE, 400, BETTER, 0, id="an improved cluster"),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.LEFT_TO_OTHERS)),
            400,
            FINGERPRINT,
            0,
            id="it bound its writer only",
        ),
        pytest.param(
            replace(NOTE, fingerprint=None), 400, FINGERPRINT, 0, id="without a fingerprint"
        ),
        pytest.param(
            replace(NOTE, next_try_ms=10**15), 0, FINGERPRINT, BINDING_MAX_MS, id="from a mad clock"
        ),
    ],
)
def test_how_long_a_note_counts(
    note: WaitingNote, now_ms: int, fingerprint: ClusterFingerprint, wait_ms: int
) -> None:
    assert note.wait_ms(now_ms=now_ms, fingerprint=fingerprint) == wait_ms


GRACE = replace(NOTE, blocked=Blocked(reason=Reason.OPEN_LEDGER_GRACE), grace_until_ms=900)


@pytest.mark.parametrize(
    ("note", "fingerprint", "is_overtaken"),
    [
        pytest.param(NOTE, FINGERPRINT, False, id="all is as it was"),
        pytest.param(NOTE, BETTER, True, id="a bookie came"),
        pytest.param(replace(NOTE, fingerprint=None), BETTER, False, id="without a fingerprint"),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.JOURNAL)),
            BETTER,
            False,
            id="no bookie helps",
        ),
        pytest.param(GRACE, BETTER, False, id="its grace continues all the same"),
        pytest.param(
            replace(GRACE, blocked=Blocked(reason=Reason.NO_COVERAGE)),
            BETTER,
            True,
            id="it may end",
        ),
        pytest.param(replace(GRACE, grace_until_ms=400), BETTER, True, id="its grace is over"),
    ],
)
def test_a_notes_reason_may_no_longer_be_true(
    note: WaitingNote, fingerprint: ClusterFingerprint, is_overtaken: bool
) -> None:
    assert note.is_overtaken(now_ms=400, fingerprint=fingerprint) is is_overtaken


@pytest.mark.parametrize(
    ("note", "reason", "fingerprint", "tries"),
    [
        pytest.param(NOTE, Reason.NO_TARGET, FINGERPRINT, 3, id="alike"),
        pytest.param(NOTE, Reason.NO_COPY, FINGERPRINT, 0, id="another reason"),
        pytest.param(NOTE, Reason.NO_TARGET, BETTER, 0, id="an improved cluster"),
        pytest.param(
            replace(NOTE, fingerprint=None),
            Reason.NO_TARGET,
            FINGERPRINT,
            0,
            id="without a fingerprint",
        ),
    ],
)
def test_tries_that_fail_for_the_same_reason_are_counted(
    note: WaitingNote, reason: Reason, fingerprint: ClusterFingerprint, tries: int
) -> None:
    assert note.tries_for(reason, fingerprint=fingerprint) == tries


def test_a_note_is_read_as_it_was_written() -> None:
    assert WaitingNote.parse(NOTE.to_json()) == NOTE


def test_a_note_stores_reason_and_facts_of_all_obstacles() -> None:
    blocked = Blocked(
        reason=Reason.NO_TARGET,
        facts=Facts(replaced=B1, excluded=((Exclusion.MEMBER, 2),), draining=(B2,)),
        until_ms=7,
        besides=(Blocked(reason=Reason.MAINTENANCE, facts=Facts(in_maintenance=(B3,))),),
    )

    data = replace(NOTE, blocked=blocked).to_json()

    assert json.loads(data)["blocked"] == {
        "reason": "no-target",
        "facts": {"replaced": B1, "excluded": [["member", 2]], "draining": [B2]},
        "until_ms": 7,
        "besides": [{"reason": "maintenance", "facts": {"in_maintenance": [B3]}}],
    }
    assert WaitingNote.parse(data).blocked == blocked


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"reason": "a-later-reason"}, id="a reason of a later release"),
        pytest.param({"facts": {"entry_count": "five"}}, id="a fact of another type"),
        pytest.param({"facts": {"comment": "\ud800"}}, id="text that cannot be written"),
        pytest.param({"besides": "none"}, id="no array"),
    ],
)
def test_a_note_that_this_release_cannot_read_is_corrupt(change: dict[str, object]) -> None:
    record = json.loads(NOTE.to_json())
    record["blocked"].update(change)

    with pytest.raises(CorruptionError):
        WaitingNote.parse(json.dumps(record).encode())


def test_unknown_fields_are_ignored() -> None:
    record = {**json.loads(NOTE.to_json()), "colour": "red"}

    assert WaitingNote.parse(json.dumps(record).encode()) == NOTE


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
        pytest.param(view(a=1, b=2), view(a=3, b=2), Reason.NO_COPY, True, id="a bookie returned"),
        pytest.param(view(a=1, b=2), view(b=2), Reason.NO_TARGET, False, id="a bookie disappeared"),
        pytest.param(
            view(a=1, b=2), view(a=1), Reason.NO_TARGET, False, id="the newest bookie disappeared"
        ),
        pytest.param(
            view(a=1, b=2), view(b=2), Reason.NO_COPY, True, id="an older bookie disappeared"
        ),
        pytest.param(
            view(a=1, b=2), view(b=2), Reason.MAINTENANCE, True, id="and another is absent"
        ),
        pytest.param(
            view(a=1, b=2),
            view(a=1),
            Reason.NO_ANSWER,
            True,
            id="the unresponsive bookie disappeared",
        ),
        pytest.param(
            view(a=1, b=2), view(a=1, c=3), Reason.NO_COPY, True, id="one bookie for another"
        ),
        pytest.param(view(a=1, draining=True), view(a=1), Reason.NO_TARGET, True, id="order over"),
        pytest.param(view(), view(), Reason.NO_COPY, False, id="no bookie is registered"),
    ],
)
def test_a_new_bookie_or_a_changed_order_improves_the_cluster(
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
        pytest.param(Orders(limits=LimitsOrder(bytes_per_s=1)), False, id="limits block nothing"),
        pytest.param(
            Orders(maintenance={B2: MaintenanceWindow(since_ms=1, until_ms=9)}), True, id="a window"
        ),
        pytest.param(Orders(draining={B2: DrainOrder(since_ms=1)}), True, id="a drain"),
    ],
)
def test_orders_that_may_block_belong_to_the_fingerprint(orders: Orders, is_another: bool) -> None:
    assert (
        ClusterFingerprint.of(replace(view(a=1), orders=orders)) != ClusterFingerprint.of(view(a=1))
    ) is is_another


# --- Absence --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bookies", "facts"),
    [
        pytest.param([], Facts(), id="no bookie"),
        pytest.param([B1], Facts(), id="registered"),
        pytest.param([B2, B1], Facts(absent=(B2,)), id="absent"),
        pytest.param([B3], Facts(decommissioned=(B3,)), id="without a cookie"),
        pytest.param([B3, B2], Facts(absent=(B2,), decommissioned=(B3,)), id="one of each"),
    ],
)
def test_absent_and_decommissioned_bookies_are_distinguished(
    bookies: list[BookieId], facts: Facts
) -> None:
    stat = Stat(version=0)
    bookies_seen = registered(**{B1.partition(":")[0]: 1})
    assert B1 in bookies_seen.available
    seen = ClusterView(bookies=bookies_seen, cookies={B1: stat, B2: stat})

    assert absence_facts(bookies, seen) == facts
