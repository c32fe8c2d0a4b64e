"""``bookmender status`` as text and as an answer. Pure."""

from dataclasses import replace
from typing import Any

from auditor.backlog import RepairProgress, Sample
from auditor.checks.records import CheckRun
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord
from daemon.limits import Limits
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.checks import CheckRow
from daemon.status.leader import LeaderState
from daemon.status.pace import copying_pace
from daemon.status.records import PendingLossRecord, help_text
from daemon.status.report import LEDGERS_LISTED_MAX, status_record, to_text
from ledgers.model import BookieId
from replication.client_activity import ClientActivity
from replication.marks import LockedLedger
from replication.nodes import Role
from replication.orders import MaintenanceWindow, Mute
from replication.reasons import Reason
from tests.daemon.status_values import HEALTHY, changed, node, note
from tests.replication.ledger_values import B1, B2, B3
from tests.said import Said

MAP = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=1_200)
LOADING = replace(MAP, is_complete=False, read_count=300, expected_count=1_000)
RUN = CheckRun(started_ms=1, ledger_count=10, ledgers_left=30, active_ms=5_000)
WINDOW = BookieRow(
    bookie=B1,
    state=BookieState.ABSENT,
    has_cookie=True,
    maintenance=MaintenanceWindow(since_ms=0, until_ms=3_660_000, reason="disk"),
)
WORKER = (node("host-a", 11, Role.WORKER),)
LEADER = {"leader": "host-a", "leader_node": node("host-a", 11, Role.AUDITOR), "nodes": WORKER}
COUNTED = LeaderState(ledger_map=MAP, is_count_complete=True, named_by={B1: 2, B3: 4})
MUTE = Mute(
    since_ms=0, until_ms=60_000, severity="WARN", subjects=(B1,), by="ann@host", reason="known"
)
SAMPLE = Sample(at_ms=1, ledgers=12, bytes=3_200_000_000)
TROUBLE: dict[str, Any] = {
    "taken_ms": 62_500,
    "leader": "host-a",
    "leader_node": node("host-a", 11, Role.AUDITOR),
    "nodes": (node("host-a", 11, Role.AUDITOR), *WORKER, node("host-b", 22, Role.WORKER)),
    "leader_state": LeaderState(
        ledger_map=MAP,
        pending_losses=(
            PendingLossRecord(bookie=B3, since_ms=0, lost_ms=122_500, is_excused=False),
        ),
        by_cause=(("all-ledgers", 1), ("lost", 104)),
        checks=(CheckRow(name="replicas", about="", interval_s=1.0, running=RUN),),
    ),
    "writable": (B1,),
    "lost": (B2,),
    "absent": (B3,),
    "marked_count": 105,
    "by_missing": ((2, 1), (1, 104)),
    "by_bookie": ((B2, 105),),
    "locked": frozenset(range(50, 54)),
    "waiting": (replace(note(7, Reason.NO_COPY, "no good copy of entry 4"), next_try_ms=70_100),),
    "waiting_count": 3,
    "foreign_locks": (
        LockedLedger(ledger_id=8, holder="java-1", since_ms=2_500, session_id=5),
        LockedLedger(ledger_id=9, holder=None, since_ms=3_500, session_id=6),
    ),
    "audit": AuditRecord(finished_ms=60_000, ledger_count=9, mark_count=2),
}


def lost(counts: dict[BookieId, int], **changes: Any) -> dict[str, Any]:
    """Return a cluster whose ledgers name the lost bookies this often, by the leader."""
    state = LeaderState(ledger_map=MAP, named_by=counts, is_count_complete=True)
    return {"lost": (B1, B2), "leader_state": replace(state, **changes)}


SCENES: dict[str, dict[str, Any]] = {
    "a healthy cluster": {},
    "every ledger is whole": {**LEADER, "leader_state": COUNTED},
    "a known loss, and one that the mute does not cover": {
        **LEADER,
        "leader_state": COUNTED,
        "absent": (B3,),
        "lost": (B1,),
        "mutes": {"BOOKIES_LOST": MUTE, "BOOKIES_ABSENT": replace(MUTE, reason="")},
    },
    "repairs of which much is known": {
        **LEADER,
        "leader_state": COUNTED,
        "marked_count": 11,
        "private_count": 1,
        "locked": frozenset({1, 2, 3}),
        "waiting": (*(note(i, Reason.MAINTENANCE) for i in range(3, 7)), note(7, Reason.NO_COPY)),
        "waiting_count": 6,
        "overtaken": frozenset({6}),
        "progress": RepairProgress(
            bytes_left=3_200_000_000, bytes_per_s=45_000_000, left_s=71, samples=(SAMPLE,)
        ),
    },
    "rule S8: without bookies nothing is concluded": {
        "writable": (),
        "is_disabled": True,
        "leader": None,
    },
    "a cluster in trouble": TROUBLE,
    "the map is loading": {"leader_state": LeaderState(ledger_map=LOADING)},
    "maintenance": {"writable": (B2, B3), "ordered": (WINDOW,), "taken_ms": 60_000},
    "one bookie has no ledgers left, one waits for others": {
        **lost({B1: 0, B2: 4}),
        "by_bookie": ((B2, 5),),
        "by_bookie_in_maintenance": ((B2, 3),),
    },
    "counted before, and so far, beside an unreadable ledger": lost(
        {B1: 50, B2: 1},
        counted_age_s=4,
        is_count_complete=False,
        ledger_map=replace(MAP, unreadable_count=1),
    ),
    "absent for an unknown time, and reformatted": {
        "absent": (B1,),
        "reformatted": (B2,),
        "by_bookie": ((B1, 2),),
        "leader_state": LeaderState(untracked=frozenset({B1}), recovery_delay_s=600),
    },
    "ledgers wait, the gravest first": {
        "marked_count": 6,
        "waiting_count": 6,
        "waiting": (
            note(1, Reason.OPEN_LEDGER_GRACE),
            replace(note(2, Reason.WRITER_ALIVE), grace_until_ms=20_000),
            replace(note(3, Reason.NO_COVERAGE), grace_until_ms=20_000),
            replace(note(4, Reason.NO_TARGET), next_try_ms=180_000),
            replace(note(5, Reason.NO_COPY), next_try_ms=500),
            note(6, Reason.NO_COPY),
        ),
        "overtaken": frozenset({6}),
    },
}


def test_the_status_as_text(said: Said) -> None:
    said("status", {name: to_text(changed(HEALTHY, **each)) for name, each in SCENES.items()})


def test_text_from_znodes_cannot_control_the_terminal() -> None:
    spoiled = "x\x1b[2J\ny"
    status = changed(
        HEALTHY,
        leader=spoiled,
        nodes=(node(spoiled, 11, Role.WORKER),),
        marked_count=1,
        waiting=(note(7, Reason.ACCESS_DENIED, spoiled),),
        waiting_count=1,
        foreign_locks=(LockedLedger(ledger_id=8, holder=spoiled, since_ms=0, session_id=5),),
    )

    text = to_text(status)

    assert all(line.isprintable() for line in text.splitlines())
    assert text.count(r"x\x1b[2J\ny") == 5
    assert help_text(status.queue.waiting[0]).isprintable()


def test_a_service_with_an_old_unexpired_session_is_shown_once() -> None:
    auditor, worker = (node("host-a", 11, role) for role in (Role.AUDITOR, Role.WORKER))

    told = to_text(changed(HEALTHY, nodes=(auditor, auditor, worker, worker)))

    assert "nodes     host-a (pid 11: auditor and worker)" in told


def test_hundreds_of_lost_bookies_leave_room_on_the_screen() -> None:
    many = tuple(BookieId(f"b{number}:3181") for number in range(300))
    told = to_text(changed(HEALTHY, lost=many)).splitlines()

    assert len(told) < 35
    assert "          and 280 more" in told


def test_a_clock_behind_the_nodes_gives_no_negative_age() -> None:
    assert "for up to 0 s" in to_text(changed(HEALTHY, waiting=(note(7, Reason.NO_COPY),)))


# --- The pace -------------------------------------------------------------------------------------

ALL = (B1, B2, B3)
QUIET = ClientActivity(quiet=frozenset(ALL))
BUSY = ClientActivity(active=frozenset(ALL))
UNLIMITED = Limits(
    bytes_per_s=0,
    entries_per_s=0,
    reads_in_flight_per_bookie=0,
    requests_per_s=0,
    yields_to_writers=True,
)
PACES: dict[str, tuple[ClientActivity | None, Limits]] = {
    "no client": (QUIET, UNLIMITED),
    "some clients": (
        ClientActivity(active=frozenset({B1, B2}), quiet=frozenset({B3})),
        UNLIMITED,
    ),
    "one unknown": (ClientActivity(active=frozenset({B1}), quiet=frozenset({B3})), UNLIMITED),
    "clients everywhere": (BUSY, UNLIMITED),
    "not published": (None, UNLIMITED),
    "clients have no priority": (BUSY, replace(UNLIMITED, yields_to_writers=False)),
    "limits": (QUIET, replace(UNLIMITED, bytes_per_s=20_000_000, entries_per_s=500)),
}


def test_the_pace_is_told_with_its_reason(said: Said) -> None:
    scenes = {}
    for name, (activity, limits) in PACES.items():
        copying = copying_pace(limits, activity, ALL)
        status = changed(HEALTHY, marked_count=1, nodes=WORKER, copying=copying)
        [line] = [line for line in to_text(status).splitlines() if "pace: " in line]
        scenes[f"{name} ({copying.speed})"] = line.strip()

    said("pace", scenes)


def test_absent_bookies_do_not_slow_copies_down() -> None:
    said = ClientActivity(active=frozenset({B1}), quiet=frozenset({B2, B3}))

    assert copying_pace(UNLIMITED, said, (B2, B3)).speed == "full"


def test_the_pace_is_shown_while_our_nodes_repair() -> None:
    for changes, is_told in (
        ({"marked_count": 1, "nodes": WORKER}, True),
        ({"marked_count": 1, "nodes": WORKER, "is_disabled": True}, False),
        ({"marked_count": 1}, False),
        ({"nodes": WORKER}, False),
    ):
        assert ("pace: yielding" in to_text(changed(HEALTHY, **changes))) is is_told


# --- The answer -----------------------------------------------------------------------------------


def test_the_answer_has_what_the_text_shows() -> None:
    told = status_record(changed(HEALTHY, **TROUBLE))

    assert (told.health, told.exit_code) == ("WARN", 1)
    assert told.conditions[0].code == "BOOKIES_LOST"
    assert (told.leader, told.leader_node) == ("host-a", told.nodes[0])
    assert (told.bookies.lost, told.bookies.absent) == ([B2], [B3])
    assert (told.queue.total, told.queue.by_missing_count) == (105, {"2": 1, "1": 104})
    assert [lock.holder for lock in told.queue.foreign_locks] == ["java-1", None]
    assert [note.reason for note in told.waiting.ledgers] == ["no-copy"]
    assert told.leader_state.pending_losses[0].lost_ms == 122_500
    assert told.leader_state.running_checks[0].check == "replicas"
    assert told.last_audit is not None
    assert told.last_audit.marks == 2


def test_each_queued_ledger_counts_once() -> None:
    told = status_record(changed(HEALTHY, **SCENES["repairs of which much is known"])).progress

    assert (told.queued, told.copying, told.needs_help) == (12, 3, 1)
    assert (told.waiting, told.next) == (3, 5), "one of them has an unreadable note"
    assert [each.ledgers for each in told.samples] == [12]


def test_maintenance_is_in_the_answer() -> None:
    told = status_record(changed(HEALTHY, writable=(B2, B3), ordered=(WINDOW,), taken_ms=60_000))
    none = status_record(HEALTHY).bookies.in_maintenance

    assert (told.health, told.ordered_bookies[0].bookie_id) == ("OK", B1)
    maintenance = told.bookies.in_maintenance
    assert (maintenance.absent, maintenance.until_ms) == ([B1], 3_660_000)
    assert (none.absent, none.until_ms) == ([], None)


def test_the_answer_lists_the_first_of_very_many_ledgers() -> None:
    count = LEDGERS_LISTED_MAX + 5
    waiting = tuple(note(ledger_id, Reason.NO_TARGET) for ledger_id in range(count))
    told = status_record(
        changed(
            HEALTHY,
            waiting=waiting,
            waiting_count=count,
            unproven=tuple(range(count)),
            overtaken=frozenset({5, count - 1}),
        )
    )

    assert told.waiting.count == told.unproven_ends.count == count
    assert len(told.waiting.ledgers) == len(told.unproven_ends.ledgers) == LEDGERS_LISTED_MAX
    assert told.waiting.overtaken == [5]
