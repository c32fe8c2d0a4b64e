"""Entries that a repair copies, and their targets."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.placement import Candidate, PlacementPolicy, RackRule, RandomPlacement
from ledgers.registration import BookieView
from replication.cluster import ClusterView
from replication.copy_reader import CopyFinding, Verdict
from replication.entry_runs import EntryRuns
from replication.orders import MaintenanceWindow, Orders
from replication.plan import Plan, plan_repair
from replication.reasons import Exclusion, Reason
from replication.targets import Targets
from tests.replication.ledger_values import (
    B1,
    B2,
    B3,
    B4,
    B5,
    B6,
    B7,
    closed_ledger,
    fragment,
    inspection_of,
    registered,
)

SEED = 3
CLOSED = closed_ledger((B1, B2, B3))
OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=1,
    state=LedgerState.OPEN,
    segments=(
        Segment(first_entry_id=0, ensemble=(B1, B2, B3)),
        Segment(first_entry_id=10, ensemble=(B4, B5, B3)),
    ),
)
AWAY = BookieId("bookie-9:3181")
EVERYBODY = (B1, B2, B3, B4, B5, B6)


def targets_of(
    bookies: Iterable[BookieId] = EVERYBODY,
    *,
    loads: Mapping[BookieId, int] | None = None,
    local: BookieId | None = None,
    refused: Collection[BookieId] = (),
    seed: int = SEED,
    **fields: Any,
) -> Targets:
    return Targets(
        candidates={
            b: Candidate(bookie=b, load_bytes=(loads or {}).get(b, 0))
            for b in bookies
            if b not in refused
        },
        barred=dict.fromkeys(refused, Exclusion.REFUSED),
        placement=RandomPlacement(random.Random(seed), local=local),
        **fields,
    )


def finding(
    index: int,
    verdict: Verdict,
    *,
    absent: tuple[int, ...] = (),
    mismatched: tuple[int, ...] = (),
    is_closed: bool = True,
) -> CopyFinding:
    return CopyFinding(
        fragment=fragment(is_closed=is_closed),
        index=index,
        verdict=verdict,
        absent=EntryRuns(absent),
        mismatched=EntryRuns(mismatched),
    )


def plan(
    findings: Sequence[CopyFinding],
    targets: Targets | None = None,
    metadata: LedgerMetadata = CLOSED,
    orders: Orders | None = None,
) -> Plan:
    return plan_repair(inspection_of(findings, metadata, orders), targets or targets_of())


@pytest.mark.compat(
    "BookieRecoveryTest.testSyncBookieRecoveryToRandomBookiesCheckForDupes", verdict="same"
)
def test_two_lost_copies_never_get_the_same_target() -> None:
    for seed in range(50):
        lost = [finding(0, Verdict.BOOKIE_ABSENT), finding(2, Verdict.BOOKIE_ABSENT)]

        repairs = plan(lost, targets_of(seed=seed)).repairs

        assert len({repair.target for repair in repairs} - {B1, B2, B3}) == 2, seed


@pytest.mark.compat(
    "G28", verdict="better", why="the least loaded bookie first, and none that refused"
)
def test_the_least_loaded_bookie_is_chosen() -> None:
    """Among equally loaded ones the local bookie."""
    loaded = targets_of((B4, B5, B6), loads={B4: 500, B5: 10, B6: 500})
    equal = targets_of((B4, B5, B6), local=B6)

    assert plan([finding(0, Verdict.BOOKIE_ABSENT)], loaded).repairs[0].target == B5
    assert plan([finding(0, Verdict.BOOKIE_ABSENT)], equal).repairs[0].target == B6


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFFailsOnlyOnLastUnClosedFragments", verdict="same"
)
def test_rule_s4_a_fragment_that_is_not_closed_is_never_copied() -> None:
    made = plan([finding(0, Verdict.BOOKIE_ABSENT, is_closed=False)])

    assert made.repairs == ()
    assert [b.reason for b in made.blocked] == [Reason.OPEN_FRAGMENT]


def test_rule_s15_damaged_entries_move_to_another_bookie() -> None:
    findings = [finding(0, Verdict.GOOD), finding(1, Verdict.MISSING, absent=(1,), mismatched=(4,))]

    [repair] = plan(findings).repairs

    assert repair.target in {B4, B5, B6}
    assert list(repair.entry_ids) == [0, 1, 3, 4, 6, 7, 9]


def test_an_earlier_copy_on_a_lost_bookie_is_repeated() -> None:
    lost = finding(0, Verdict.BOOKIE_ABSENT)
    targets = targets_of((B4,), copied={(lost.fragment, lost.index): B5})

    [repair] = plan([lost], targets).repairs

    assert repair.target == B4
    assert len(repair.entry_ids) == 7


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(finding(1, Verdict.GOOD), id="a good copy"),
        pytest.param(finding(1, Verdict.MISSING, mismatched=(0, 9)), id="one good entry"),
    ],
)
def test_rule_s7_the_key_is_not_suspected_if_anything_matches(other: CopyFinding) -> None:
    all_bad = finding(0, Verdict.MISSING, mismatched=(0, 2, 3, 5, 6, 8, 9))

    assert Reason.DIGEST_SUSPECT not in {b.reason for b in plan([all_bad, other]).blocked}


def test_rule_s12_last_ensemble_members_get_no_copies_in_place() -> None:
    """The ledger is not closed."""
    findings = [finding(0, Verdict.MISSING, absent=(0,)), finding(2, Verdict.MISSING, absent=(1,))]

    refilled, moved = plan(findings, metadata=OPEN).repairs

    assert refilled.is_in_place
    assert moved.target == B6
    assert len(moved.entry_ids) == 6


def test_rule_s12_without_a_target_they_do_with_a_rewritten_lac() -> None:
    made = plan(
        [finding(2, Verdict.MISSING, absent=(1,))], targets_of((B1, B2, B3, B4, B5)), metadata=OPEN
    )

    [repair] = made.repairs
    assert repair.is_in_place
    assert repair.rewrites_lac
    assert list(repair.entry_ids) == [1]


def test_rule_s5_an_unanswered_open_fragment_lacks_nothing() -> None:
    made = plan([finding(0, Verdict.UNKNOWN, is_closed=False)])

    assert [b.reason for b in made.blocked] == [Reason.NO_ANSWER]


def test_rule_s3_the_target_of_an_earlier_copy_is_kept() -> None:
    first, second = finding(0, Verdict.BOOKIE_ABSENT), finding(2, Verdict.BOOKIE_ABSENT)
    targets = targets_of((B4, B5), copied={(second.fragment, second.index): B4})

    made = plan([first, second], targets)

    assert [(r.index, r.target, len(r.entry_ids)) for r in made.repairs] == [(0, B5, 7), (2, B4, 0)]


# --- Orders ---------------------------------------------------------------------------------------


def test_rule_s16_a_draining_bookie_moves_with_all_its_entries() -> None:
    [repair] = plan([finding(1, Verdict.DRAINING)]).repairs

    assert repair.target in {B4, B5, B6}
    assert len(repair.entry_ids) == 7


@pytest.mark.parametrize(
    ("windows", "fields", "in_maintenance", "absent"),
    [
        pytest.param((B4,), {}, (B4,), (), id="it runs"),
        pytest.param(
            (B4, AWAY), {}, tuple(sorted((B4, AWAY))), (AWAY,), id="one of two is not enough"
        ),
        pytest.param((B2,), {}, (), (), id="a member of the ensemble helps nothing"),
        pytest.param((B4,), {"only_local": B5}, (), (), id="another target does not help"),
    ],
)
def test_bookies_excluded_only_by_maintenance_are_named(
    windows: tuple[BookieId, ...],
    fields: dict[str, Any],
    in_maintenance: tuple[BookieId, ...],
    absent: tuple[BookieId, ...],
) -> None:
    window = MaintenanceWindow(since_ms=1, until_ms=9)
    view = ClusterView(
        bookies=BookieView(writable=registered((B1, B2, B3, B4))),
        orders=Orders(maintenance=dict.fromkeys(windows, window)),
    )
    inspection = structs.replace(inspection_of([finding(2, Verdict.DRAINING)]), view=view)

    made = plan_repair(inspection, targets_of((B1, B2), **fields))

    [blocked] = made.blocked
    assert blocked.facts.in_maintenance == in_maintenance
    assert blocked.facts.absent == absent


def test_the_size_of_a_copy_is_estimated_by_the_ledgers_length() -> None:
    [repair] = plan([finding(1, Verdict.BOOKIE_ABSENT)]).repairs

    assert repair.byte_count == 7 * (32 + 4 + 100)


@pytest.mark.parametrize(
    ("available", "target", "rewrites_lac"),
    [
        pytest.param(EVERYBODY, B6, False, id="another bookie comes first"),
        pytest.param((B1, B3, B4), B4, True, id="only a member of the open end is left"),
    ],
)
def test_rule_s12_a_member_of_the_open_end_is_the_last_resort(
    available: tuple[BookieId, ...], target: BookieId, rewrites_lac: bool
) -> None:
    """It is chosen as a target for a closed fragment only if there is no other."""
    lost = finding(1, Verdict.BOOKIE_ABSENT)

    for seed in range(10):
        [repair] = plan([lost], targets_of(available, seed=seed), metadata=OPEN).repairs

        assert (repair.target, repair.rewrites_lac) == (target, rewrites_lac), seed


# --- Copies that all exist, some of them misplaced ------------------------------------------------

RACKS = {B1: "/a", B2: "/a", B3: "/a", B4: "/b", B5: "/b", B6: "/c"}
"""The rack of B7 is unknown."""


def plan_of_moves(
    ensemble: Sequence[BookieId],
    *,
    candidates: Collection[BookieId] = (B1, B2, B3, B4, B5, B6),
    write_quorum: int = 2,
    verdict: Verdict = Verdict.GOOD,
    metadata: LedgerMetadata | None = None,
    moves_misplaced: bool = True,
    only_local: BookieId | None = None,
) -> Plan:
    """Return the plan for a ledger on one ensemble. ``verdict`` is of the bookie at index 0."""
    members = tuple(ensemble)
    findings = [
        CopyFinding(
            fragment=fragment(members, write_quorum=write_quorum),
            index=index,
            verdict=Verdict.GOOD if index else verdict,
        )
        for index in range(len(members))
    ]
    targets = Targets(
        candidates={b: Candidate(bookie=b, rack=RACKS[b]) for b in candidates},
        placement=PlacementPolicy(RackRule(), random.Random(0), locate=RACKS.get),
        only_local=only_local,
    )
    inspection = inspection_of(
        findings, metadata or closed_ledger(members, write_quorum=write_quorum)
    )
    return plan_repair(inspection, targets, moves_misplaced=moves_misplaced)


def test_as_many_copies_move_as_the_rule_demands() -> None:
    made = plan_of_moves((B1, B2, B3))

    assert len(made.repairs) == 2
    assert {RACKS[repair.target] for repair in made.repairs} == {"/b", "/c"}


@pytest.mark.parametrize(
    ("ensemble", "options"),
    [
        pytest.param((B1, B4), {}, id="it is well placed"),
        pytest.param((B1, B7), {}, id="the rack of a member is unknown"),
        pytest.param((B1, B2), {"moves_misplaced": False}, id="moves are not wanted"),
        pytest.param(
            (B1, B2),
            {
                "metadata": replace(
                    closed_ledger((B1, B2)), state=LedgerState.OPEN, last_entry_id=-1, length=0
                )
            },
            id="it is being written",
        ),
    ],
)
def test_no_copy_moves(ensemble: Sequence[BookieId], options: dict[str, object]) -> None:
    assert plan_of_moves(ensemble, **options) == Plan()  # type: ignore[arg-type]


def test_while_a_copy_is_missing_only_that_one_is_copied() -> None:
    made = plan_of_moves((B1, B2, B3), verdict=Verdict.BOOKIE_ABSENT)

    [repair] = made.repairs
    assert repair.replaced == B1


@pytest.mark.compat(
    "G18",
    verdict="better",
    why="the ledger waits, without a lock, until a new bookie registers; the reason names the "
    "placement rule",
)
def test_the_rule_is_named_if_no_bookie_is_better_placed() -> None:
    made = plan_of_moves((B1, B2), candidates=(B3,))

    [blocked] = made.blocked
    assert not made.repairs
    assert blocked.reason is Reason.MISPLACED
    assert blocked.reason.needs_help
    assert "at least 2 racks in each write set" in blocked.facts.errors[0]


def test_partial_improvements_are_made_and_the_rest_is_reported() -> None:
    """Two racks for a ring of three: one write set stays in one rack."""
    made = plan_of_moves((B1, B2, B3), candidates=(B4, B5))

    assert len(made.repairs) == 1
    assert [blocked.reason for blocked in made.blocked] == [Reason.MISPLACED]


def test_a_node_for_its_own_bookie_only_leaves_moves_to_others() -> None:
    made = plan_of_moves((B1, B2), candidates=(B3,), only_local=B3)

    assert [blocked.reason for blocked in made.blocked] == [Reason.LEFT_TO_OTHERS]
