"""What a plan says of a fragment that is not closed: what it waits for, and what helps."""

import random

import pytest

from ledgers.placement import RandomPlacement
from replication.planning.check import IndexFinding, Verdict
from replication.planning.entry_runs import EntryRuns
from replication.planning.plan import plan_repair
from replication.planning.targets import Targets
from tests.replication.ledger_values import B1, fragment, survey_of


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
