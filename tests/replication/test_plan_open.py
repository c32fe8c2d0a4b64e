"""Plans for fragments that are not closed: what they wait for, and what helps."""

import random

import pytest

from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.placement import Candidate, RandomPlacement
from replication.copy_reader import CopyFinding, Verdict
from replication.entry_runs import EntryRuns
from replication.plan import Plan, plan_repair
from replication.reasons import Blocked, Facts, Reason
from replication.targets import Targets
from tests.replication.ledger_values import B1, B2, B3, B4, B5, fragment, inspection_of


@pytest.mark.parametrize(
    ("verdict", "facts"),
    [
        pytest.param(Verdict.MISSING, Facts(lacking=(B1,)), id="it was reformatted"),
        pytest.param(Verdict.DRAINING, Facts(draining=(B1,)), id="it drains"),
    ],
)
def test_an_open_fragment_is_left_to_its_writer(verdict: Verdict, facts: Facts) -> None:
    finding = CopyFinding(
        fragment=fragment(is_closed=False), index=0, verdict=verdict, absent=EntryRuns([7])
    )
    targets = Targets(candidates={}, placement=RandomPlacement(random.Random(0)))

    [blocked] = plan_repair(inspection_of([finding]), targets).blocked

    assert blocked == Blocked(reason=Reason.OPEN_FRAGMENT, facts=facts)


OPEN_AFTER_A_CHANGE = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=1,
    state=LedgerState.OPEN,
    segments=(
        Segment(first_entry_id=0, ensemble=(B1, B2, B3)),
        Segment(first_entry_id=10, ensemble=(B1, B4, B3)),
    ),
)


def plan_of(available: tuple[BookieId, ...]) -> Plan:
    """Return the plan for the closed fragment, whose bookie B2 is lost."""
    finding = CopyFinding(fragment=fragment(), index=1, verdict=Verdict.BOOKIE_ABSENT)
    placement = RandomPlacement(random.Random(0))
    candidates = {bookie: Candidate(bookie=bookie) for bookie in available}
    targets = Targets(candidates=candidates, placement=placement)
    return plan_repair(inspection_of([finding], OPEN_AFTER_A_CHANGE), targets)


@pytest.mark.parametrize(
    ("available", "target", "rewrites_lac"),
    [
        pytest.param((B1, B3, B4, B5), B5, False, id="another bookie comes first"),
        pytest.param((B1, B3, B4), B4, True, id="only a member of the open end is left"),
    ],
)
def test_rule_s12_a_member_of_the_open_end_is_the_last_resort(
    available: tuple[BookieId, ...], target: BookieId, rewrites_lac: bool
) -> None:
    """It is chosen as a target for a closed fragment only if there is no other."""
    [repair] = plan_of(available).repairs

    assert (repair.target, repair.rewrites_lac) == (target, rewrites_lac)


def test_no_bookie_is_in_an_ensemble_twice() -> None:
    [blocked] = plan_of((B1, B3)).blocked

    assert blocked.reason is Reason.NO_TARGET
