"""What a plan says of a fragment that is not closed: what it waits for, and what helps."""

import random

import pytest

from ledgers.metadata import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.placement import Candidate, RandomPlacement
from replication.planning.check import IndexFinding, Verdict
from replication.planning.entry_runs import EntryRuns
from replication.planning.plan import plan_repair
from replication.planning.targets import Targets
from replication.reasons import Reason
from tests.replication.ledger_values import B1, B2, B3, B4, fragment, survey_of


@pytest.mark.parametrize(
    ("verdict", "can_be_fenced"),
    [
        pytest.param(Verdict.MISSING, False, id="it was wiped"),
        pytest.param(Verdict.DRAINING, True, id="it drains"),
    ],
)
def test_what_helps_is_said(verdict: Verdict, can_be_fenced: bool) -> None:
    finding = IndexFinding(
        fragment=fragment(is_closed=False), index=0, verdict=verdict, absent=EntryRuns([7])
    )
    targets = Targets(candidates={}, placement=RandomPlacement(random.Random(0)))

    [blocked] = plan_repair(survey_of([finding]), targets).blocked

    assert "its writer is to close it, or" in blocked.detail
    assert "bookmender ledger close 7 --yes (with --force" in blocked.detail
    assert (f"bookmender bookie drain {B1} --fence-open" in blocked.detail) is can_be_fenced


@pytest.mark.parametrize(
    ("available", "helps"),
    [
        pytest.param((B1, B3, B4), True, id="a member of its end could take over"),
        pytest.param((B1, B3), False, id="nobody could, closed or not"),
    ],
)
def test_a_closed_part_that_only_members_of_the_open_end_could_take_says_that_closing_helps(
    available: tuple[BookieId, ...], helps: bool
) -> None:
    metadata = LedgerMetadata(
        ensemble_size=3,
        write_quorum=2,
        ack_quorum=1,
        state=LedgerState.OPEN,
        segments=(
            Segment(first_entry_id=0, ensemble=(B1, B2, B3)),
            Segment(first_entry_id=10, ensemble=(B1, B4, B3)),
        ),
    )
    finding = IndexFinding(fragment=fragment(), index=1, verdict=Verdict.LOST)
    placement = RandomPlacement(random.Random(0))
    candidates = {bookie: Candidate(bookie=bookie) for bookie in available}
    targets = Targets(candidates=candidates, placement=placement)

    [blocked] = plan_repair(survey_of([finding], metadata), targets).blocked

    assert blocked.reason is Reason.NO_TARGET
    told = f"; {B4} may once the ledger is closed: its writer is to close it, or"
    assert (told in blocked.detail) is helps
    assert ("bookmender ledger close 7 --yes" in blocked.detail) is helps
