"""Copies that all exist, some of them misplaced: which of them a plan moves, and when it moves
none."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from ledgers.model import BookieId, LedgerMetadata, LedgerState
from ledgers.placement import Candidate, PlacementPolicy, RackRule
from replication.copy_reader import CopyFinding, Verdict
from replication.plan import Plan, plan_repair
from replication.reasons import Reason
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
)

RACKS = {B1: "/a", B2: "/a", B3: "/a", B4: "/b", B5: "/b", B6: "/c"}
"""The rack of B7 is unknown."""


def plan(
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


def test_a_copy_of_a_misplaced_ensemble_moves_to_another_rack() -> None:
    made = plan((B1, B2))

    [repair] = made.repairs
    assert repair.replaced in {B1, B2}
    assert RACKS[repair.target] != "/a"
    assert list(repair.entry_ids) == list(range(10))
    assert not made.blocked


def test_as_many_copies_move_as_the_rule_demands() -> None:
    made = plan((B1, B2, B3))

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
    assert plan(ensemble, **options) == Plan()  # type: ignore[arg-type]


def test_while_a_copy_is_missing_only_that_one_is_copied() -> None:
    made = plan((B1, B2, B3), verdict=Verdict.BOOKIE_ABSENT)

    [repair] = made.repairs
    assert repair.replaced == B1


@pytest.mark.compat(
    "G18",
    verdict="better",
    why="the ledger waits, without a lock, until a new bookie registers; the reason names the "
    "placement rule",
)
def test_the_rule_is_named_if_no_bookie_is_better_placed() -> None:
    made = plan((B1, B2), candidates=(B3,))

    [blocked] = made.blocked
    assert not made.repairs
    assert blocked.reason is Reason.MISPLACED
    assert blocked.reason.needs_help
    assert "at least 2 racks in each write set" in blocked.facts.errors[0]


def test_partial_improvements_are_made_and_the_rest_is_reported() -> None:
    """Two racks for a ring of three: one write set stays in one rack."""
    made = plan((B1, B2, B3), candidates=(B4, B5))

    assert len(made.repairs) == 1
    assert [blocked.reason for blocked in made.blocked] == [Reason.MISPLACED]


def test_a_node_for_its_own_bookie_only_leaves_moves_to_others() -> None:
    made = plan((B1, B2), candidates=(B3,), only_local=B3)

    assert [blocked.reason for blocked in made.blocked] == [Reason.LEFT_TO_OTHERS]
