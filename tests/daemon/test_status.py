"""``bookmender status``: the verdict, and how what was gathered is told."""

from dataclasses import replace

import pytest

from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord
from daemon.cli.bookies import BookieRow, BookieState
from daemon.messages import message
from daemon.status.command import render
from daemon.status.leader import LeaderState
from daemon.status.records import help_text
from replication.marks import LockedLedger
from replication.nodes import NodeInfo, Role
from replication.orders import HoldOrder, MaintenanceWindow
from replication.reasons import Reason
from tests.daemon.status_values import WHOLE, node, note
from tests.replication.ledger_values import B1, B2, B3

# --- The verdict ----------------------------------------------------------------------------------

ALONE = {"leader": None}
"""Neither a node nor an auditor is running."""
ATTENDED = {"nodes": (node("host-a", 11, Role.WORKER),)}
OURS_LEADS = {"leader": "host-a", "leader_node": node("host-a", 11, Role.AUDITOR)}
INDEX = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=9)
BUILT = LeaderState(index=INDEX)
BUILDING = LeaderState(index=replace(INDEX, is_complete=False))
AWAY = BookieRow(
    bookie=B1,
    state=BookieState.AWAY,
    has_cookie=True,
    maintenance=MaintenanceWindow(since_ms=0, until_ms=3_660_000, reason="disk"),
)
THERE = replace(AWAY, state=BookieState.WRITABLE)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        pytest.param({}, "whole", id="nothing marked, nobody lost"),
        pytest.param({"is_disabled": True}, "whole", id="whole, though it is disabled"),
        pytest.param({"lost": (B1,)}, "bookies-lost", id="a bookie is lost, nothing marked yet"),
        pytest.param({"away": (B1,)}, "bookies-away", id="it is away, and has time left"),
        pytest.param({"away": (B1,), "lost": (B2,)}, "bookies-lost", id="and another has none"),
        pytest.param({"away": (B1,), **ALONE}, "bookies-away", id="whoever counts it"),
        pytest.param(ALONE, "no-auditor", id="nobody would notice a loss"),
        pytest.param({**ALONE, **ATTENDED}, "no-auditor", id="a worker would not either"),
        pytest.param(
            {**ALONE, "ordered": (AWAY,)}, "no-auditor", id="nobody looks beside maintenance"
        ),
        pytest.param({"marked_count": 2, **ATTENDED}, "repairing", id="marked"),
        pytest.param(
            {"marked_count": 2, "lost": (B1,), **ATTENDED}, "repairing", id="marked, for a reason"
        ),
        pytest.param({"marked_count": 2, **ALONE}, "unattended", id="marked, and there is no node"),
        pytest.param(
            {"marked_count": 1, "waiting": (note(1, Reason.NO_COPY),), **ALONE},
            "unattended",
            id="there is no node that help would help",
        ),
        pytest.param({"marked_count": 2}, "repairing", id="Java's leads"),
        pytest.param(
            {"marked_count": 2, "under_repair": 1, **ALONE}, "repairing", id="somebody's lock"
        ),
        pytest.param({"marked_count": 2, "is_disabled": True}, "disabled", id="nobody repairs"),
        pytest.param(
            {"marked_count": 1, "waiting": (note(1, Reason.OPEN_LEDGER_GRACE),), **ATTENDED},
            "repairing",
            id="time will help",
        ),
        pytest.param(
            {
                "marked_count": 2,
                "waiting": (note(1, Reason.NO_ANSWER), note(2, Reason.NO_COPY)),
                **ATTENDED,
            },
            "repairing",
            id="one of them needs help, the other time",
        ),
        pytest.param(
            {"marked_count": 1, "waiting": (note(2, Reason.NO_COPY),), **ATTENDED},
            "stuck",
            id="all of them need help",
        ),
        pytest.param(
            {"audit": AuditRecord(finished_ms=0, ledger_count=9, mark_count=0, unreadable_count=1)},
            "unreadable",
            id="nothing is marked, but not everything could be read",
        ),
        pytest.param({"writable": (), "read_only": (B1,)}, "none-writable", id="none is writable"),
        pytest.param({"writable": ()}, "no-bookies", id="rule S8: an empty list is unknown"),
        pytest.param(
            {"writable": (), "marked_count": 2, "hold": HoldOrder(since_ms=0)},
            "no-bookies",
            id="rule S8: whatever else is known",
        ),
        pytest.param(
            {
                "lost": (B1,),
                "audit": AuditRecord(
                    finished_ms=0, ledger_count=9, mark_count=0, unreadable_count=1
                ),
            },
            "bookies-lost",
            id="a lost bookie is graver than what cannot be read",
        ),
        pytest.param(OURS_LEADS, "indexing", id="the leader has not said how far its index is"),
        pytest.param({**OURS_LEADS, "auditing": BUILDING}, "indexing", id="it is being built"),
        pytest.param({**OURS_LEADS, "auditing": BUILT}, "whole", id="the index is complete"),
        pytest.param(
            {**OURS_LEADS, "lost": (B1,)}, "bookies-lost", id="lost, whatever the index says"
        ),
        pytest.param({"ordered": (AWAY,)}, "maintenance", id="away on purpose"),
        pytest.param({"ordered": (THERE,)}, "whole", id="a window, and the bookie is there"),
        pytest.param({"ordered": (AWAY,), "lost": (B2,)}, "bookies-lost", id="and another is lost"),
        pytest.param({"own_marked_count": 1}, "whole", id="ledgers are being moved"),
        pytest.param(
            {"own_marked_count": 1, "waiting": (note(1, Reason.NO_TARGET),)},
            "drain-stuck",
            id="nowhere to move them to",
        ),
        pytest.param(
            {"own_marked_count": 2, "waiting": (note(1, Reason.NO_TARGET),)},
            "whole",
            id="some can be moved",
        ),
        pytest.param({"unproven": (7,)}, "ends-unproven", id="whole, but where does it end?"),
        pytest.param({"unproven": (7,), "lost": (B1,)}, "bookies-lost", id="a bookie is lost, too"),
        pytest.param(
            {"unreadable_orders": ("/x",)}, "orders-unreadable", id="an order nobody reads"
        ),
    ],
)
def test_the_verdict_is_one_word(changes: dict[str, object], verdict: str) -> None:
    status = replace(WHOLE, **changes)  # type: ignore[arg-type]

    assert status.verdict == verdict
    assert status.to_json()["verdict"] == verdict


@pytest.mark.parametrize(
    ("changes", "exit_code"),
    [
        pytest.param({}, 0, id="whole"),
        pytest.param({"ordered": (AWAY,)}, 0, id="an operator ordered it, and knows"),
        pytest.param({"ordered": (AWAY,), "unreadable_orders": ("/x",)}, 1, id="an order is lost"),
        pytest.param({"lost": (B1,)}, 1, id="lost"),
        pytest.param({"marked_count": 1}, 1, id="marked"),
        pytest.param({"away": (B1,)}, 1, id="away, and no operator said why"),
        pytest.param({"unproven": (7,)}, 1, id="an operator is needed"),
        pytest.param({"writable": (), "read_only": (B1,)}, 1, id="none is writable"),
        pytest.param({"writable": ()}, 3, id="rule S8: nobody can tell"),
        pytest.param(ALONE, 3, id="nobody looks"),
        pytest.param(OURS_LEADS, 3, id="nobody can tell yet"),
    ],
)
def test_the_exit_code_parts_well_from_ill_from_unknown(
    changes: dict[str, object], exit_code: int
) -> None:
    assert replace(WHOLE, **changes).exit_code == exit_code  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "needs_help"),
    [
        (Reason.OPEN_LEDGER_GRACE, False),
        (Reason.OPEN_FRAGMENT, False),
        (Reason.WRITER_ALIVE, False),
        (Reason.NO_COPY, True),
        (Reason.NO_TARGET, True),
        (Reason.MISPLACED, True),
        (Reason.NO_ANSWER, False),
        (Reason.RECOVERY_FAILED, False),
        (Reason.NO_COVERAGE, True),
        (Reason.END_UNPROVEN, True),
        (Reason.RECOVERY_UNENDED, True),
        (Reason.CORRUPT_METADATA, True),
        (Reason.SHUT_AWAY, True),
        (Reason.DIGEST_SUSPECT, True),
        (Reason.CONFLICTS, False),
        (Reason.JOURNAL, True),
    ],
)
def test_what_time_alone_will_not_help(reason: Reason, needs_help: bool) -> None:
    assert reason.needs_help is needs_help


# --- As text --------------------------------------------------------------------------------------


def test_a_whole_cluster_is_told_in_five_lines() -> None:
    assert render(WHOLE, now_ms=0).splitlines() == [
        "verdict   whole",
        "leader    java:3181 (Java's AutoRecovery)",
        "nodes     none: start one with bookmender daemon",
        "bookies   3 writable, 0 read-only, 0 lost",
        "queue     0 ledgers marked, 0 locked for repair, 0 waiting",
    ]


def test_rule_s8_of_an_empty_list_of_bookies_nothing_is_concluded() -> None:
    status = replace(WHOLE, writable=(), is_disabled=True, leader=None)

    assert render(status, now_ms=0).splitlines() == [
        "verdict   no-bookies (no bookie is registered at all: is it ZooKeeper, or the network? "
        "nothing is concluded; auto-recovery is disabled)",
        "leader    none is registered either",
        "nodes     none is registered either",
        "bookies   0 writable, 0 read-only: who is lost is not known",
        "queue     0 ledgers marked, 0 locked for repair, 0 waiting",
    ]


def test_a_bookie_that_is_away_on_purpose_is_told_with_until_when() -> None:
    status = replace(WHOLE, writable=(B2, B3), ordered=(AWAY, replace(THERE, bookie=B2)))

    lines = render(status, now_ms=60_000).splitlines()

    assert lines[0] == (
        "verdict   maintenance (1 bookie is away on purpose, for another 1 h at most: "
        "its ledgers are a copy short meanwhile)"
    )
    assert lines[3] == "bookies   2 writable, 0 read-only, 0 lost, 1 away on purpose"
    assert status.to_json()["bookies"]["on_purpose"] == {"away": [B1], "until_ms": 3_660_000}
    assert WHOLE.to_json()["bookies"]["on_purpose"] == {"away": [], "until_ms": None}


def test_while_the_index_is_built_it_is_said_that_more_may_come() -> None:
    first = render(replace(WHOLE, **OURS_LEADS), now_ms=0).splitlines()[0]  # type: ignore[arg-type]

    assert first.startswith(
        "verdict   indexing (the leader has not read every ledger's metadata yet"
    )


def test_that_nobody_is_there_to_repair_is_said_with_what_to_do() -> None:
    first = render(replace(WHOLE, leader=None, marked_count=2), now_ms=0).splitlines()[0]

    assert first.startswith("verdict   unattended (")
    assert "start a node with bookmender daemon" in first


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        pytest.param(
            (),
            "no auditor is running, ours or Java's: what is lost is not noticed; "
            "start a node with bookmender daemon",
            id="no node",
        ),
        pytest.param(
            (node("host-a", 11, Role.WORKER),),
            "no auditor is running, ours or Java's: what is lost is not noticed; "
            "start a node with auditor.enabled = true",
            id="a worker only",
        ),
        pytest.param(
            (node("host-a", 11, Role.AUDITOR),),
            "no auditor leads yet, though a node stands for it: look again in some seconds",
            id="not elected yet",
        ),
    ],
)
def test_without_an_auditor_it_is_said_what_to_do(nodes: tuple[NodeInfo, ...], text: str) -> None:
    alone = replace(WHOLE, leader=None, nodes=nodes)

    lines = render(alone, now_ms=0).splitlines()
    first_of_lost = render(replace(alone, lost=(B1,)), now_ms=0).splitlines()[0]

    assert lines[:2] == [f"verdict   no-auditor ({text})", "leader    none: no auditor is running"]
    assert first_of_lost == f"verdict   bookies-lost ({text})"


def test_a_hold_is_told_before_anything_else() -> None:
    hold = HoldOrder(since_ms=0, until_ms=90_000, reason="3 of 5 bookies went within 120 s")
    status = replace(WHOLE, hold=hold, marked_count=2, is_disabled=True)

    first, second, *_ = render(status, now_ms=60_000).splitlines()

    assert first.startswith("HOLD      held for 1 min by the leader (3 of 5 bookies went")
    assert "for another 30 s" in first
    assert second.startswith("verdict   held")
    assert status.to_json()["hold"]["reason"] == hold.reason


@pytest.mark.parametrize(
    ("changes", "ends_soon"),
    [
        pytest.param(OURS_LEADS, True, id="the leader sees to it"),
        pytest.param({**OURS_LEADS, "lost": (B1,)}, False, id="one is still away"),
        pytest.param({**OURS_LEADS, "away": (B1,)}, False, id="and has time left"),
        pytest.param({**OURS_LEADS, "writable": ()}, False, id="rule S8: nobody can tell"),
        pytest.param(ALONE, False, id="nobody leads"),
    ],
)
def test_a_hold_ends_soon_after_its_bookies_are_back(
    changes: dict[str, object], ends_soon: bool
) -> None:
    held = replace(WHOLE, hold=HoldOrder(since_ms=0, until_ms=90_000, bookies=(B1, B2)))

    first = render(replace(held, **changes), now_ms=0).splitlines()[0]  # type: ignore[arg-type]

    assert ("ending soon" in first) is ends_soon


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, True, id="a node works on them"),
        pytest.param({"is_disabled": True}, False, id="nobody does: it is switched off"),
        pytest.param({"nodes": ()}, False, id="nobody does: there is no node"),
        pytest.param({"nodes": (node("host-a", 11, Role.AUDITOR),)}, False, id="nor a worker"),
    ],
)
def test_of_a_hold_it_is_told_what_is_repaired_meanwhile(
    changes: dict[str, object], is_told: bool
) -> None:
    workers = (node("host-a", 11, Role.WORKER),)
    held = replace(WHOLE, hold=HoldOrder(since_ms=0), marked_count=503, nodes=workers)

    first = render(replace(held, **changes), now_ms=60_000).splitlines()[0]  # type: ignore[arg-type]

    assert ("503 ledgers marked before can be repaired meanwhile" in first) is is_told


def test_a_cluster_in_trouble_is_told_in_full() -> None:
    status = replace(
        WHOLE,
        leader="host-a",
        leader_node=node("host-a", 11, Role.AUDITOR),
        nodes=(
            node("host-a", 11, Role.AUDITOR),
            node("host-a", 11, Role.WORKER),
            node("host-b", 22, Role.WORKER),
        ),
        read_only=(B3,),
        writable=(B1,),
        lost=(B2,),
        is_disabled=True,
        marked_count=105,
        by_missing=((2, 1), (1, 104)),
        under_repair=4,
        waiting=(replace(note(7, Reason.NO_COPY, "no good copy of entry 4"), next_try_ms=70_100),),
        waiting_count=3,
        foreign_locks=(
            LockedLedger(ledger_id=8, holder="java-1", since_ms=2_500, session_id=5),
            LockedLedger(ledger_id=9, holder=None, since_ms=3_500, session_id=6),
        ),
        audit=AuditRecord(
            finished_ms=60_000, ledger_count=9, mark_count=2, unreadable_count=1, unreadable=(8,)
        ),
    )

    assert render(status, now_ms=62_500).splitlines() == [
        "verdict   disabled (auto-recovery is disabled)",
        "leader    host-a (pid 11)",
        "nodes     host-a (pid 11: auditor and worker), host-b (pid 22: worker)",
        "bookies   1 writable, 1 read-only, 1 lost",
        f"          lost: {B2}, no ledger is marked for it: auto-recovery is disabled",
        "queue     105 ledgers marked, 4 locked for repair, 3 waiting",
        "          1 missing 2 bookies",
        "          104 missing 1 bookie",
        "locks     2 held by others than our nodes, the longest for 60 s: ledger 8, by java-1",
        "audit     2 s ago, 9 ledgers, the metadata of 1 unreadable: 8",
        "waiting   (bookmender queue list tells of each)",
        "  1 no-copy, for up to 1 min 1 s, next try in 8 s: ledger 7",
        f"      {message(7, status.waiting[0].blocked).text}",
    ]


def test_a_leader_that_is_no_node_of_ours_is_javas() -> None:
    text = render(replace(WHOLE, leader="java:3181"), now_ms=0)

    assert "leader    java:3181 (Java's AutoRecovery)" in text


def test_a_terminal_obeys_nothing_of_what_stands_in_znodes() -> None:
    spoiled = "x\x1b[2J\ny"
    status = replace(
        WHOLE,
        leader=spoiled,
        nodes=(node(spoiled, 11, Role.WORKER),),
        waiting=(note(7, Reason.CORRUPT_METADATA, spoiled),),
        waiting_count=1,
        foreign_locks=(LockedLedger(ledger_id=8, holder=spoiled, since_ms=0, session_id=5),),
    )

    text = render(status, now_ms=0)

    assert all(line.isprintable() for line in text.splitlines())
    assert text.count(r"x\x1b[2J\ny") == 4
    assert help_text(status.waiting[0]).isprintable()


def test_a_clock_that_is_behind_the_nodes_makes_no_negative_age() -> None:
    status = replace(WHOLE, waiting=(note(7, Reason.NO_COPY),), waiting_count=1, marked_count=1)

    assert "for up to 0 s" in render(status, now_ms=0)
