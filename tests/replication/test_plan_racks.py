"""A plan obeys the racks, and names the rule that leaves no target."""

import random
from collections.abc import Mapping, Sequence

import pytest

from ledgers.digest import EntryDigest
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, DigestType
from ledgers.placement import Candidate, PlacementPolicy, RackRule
from ledgers.registration import BookieView
from ledgers.store import Stat
from replication.cluster import ClusterView
from replication.copy_reader import CopyFinding, Verdict
from replication.inspection import Inspection
from replication.plan import Plan, plan_repair
from replication.reasons import Reason
from replication.targets import Targets
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, closed_ledger, fragment

SEEDS = range(20)
RACKS = {B1: "/a", B2: "/b", B3: "/c", B4: "/a", B5: "/b", B6: "/c"}
"""B1, B2 and B3 hold a ledger with W 2: any two of them that follow each other share entries."""


def plan(
    *lost: BookieId,
    candidates: Sequence[BookieId],
    is_enforced: bool = True,
    racks: Mapping[BookieId, str] = RACKS,
    seed: int = 0,
) -> Plan:
    ensemble = (B1, B2, B3)
    inspection = Inspection(
        versioned=VersionedMetadata(
            ledger_id=7, metadata=closed_ledger(ensemble), stat=Stat(version=0), data=b""
        ),
        view=ClusterView(bookies=BookieView()),
        digest=EntryDigest(DigestType.CRC32C, b""),
        findings=tuple(
            CopyFinding(
                fragment=fragment(is_closed=True),
                index=index,
                verdict=Verdict.BOOKIE_ABSENT if bookie in lost else Verdict.GOOD,
            )
            for index, bookie in enumerate(ensemble)
        ),
    )
    placement = PlacementPolicy(
        RackRule(is_enforced=is_enforced), random.Random(seed), locate=racks.__getitem__
    )
    targets = Targets(
        candidates={b: Candidate(bookie=b, rack=racks[b]) for b in candidates},
        placement=placement,
    )
    return plan_repair(inspection, targets)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_goes_to_a_rack_that_satisfies_the_rule(seed: int) -> None:
    [repair] = plan(B1, candidates=(B4, B5, B6), seed=seed).repairs

    assert repair.target == B4


@pytest.mark.parametrize("seed", SEEDS)
def test_two_lost_copies_do_not_go_to_the_same_rack(seed: int) -> None:
    repairs = plan(B1, B2, candidates=(B4, B5, B6), seed=seed).repairs

    racks = [RACKS[B3], *(RACKS[repair.target] for repair in repairs)]
    assert sorted(racks) == ["/a", "/b", "/c"]


def test_the_rule_is_named_if_it_leaves_no_target() -> None:
    made = plan(B1, candidates=(B5, B6))

    [blocked] = made.blocked
    assert blocked.reason is Reason.NO_TARGET
    assert "at least 2 racks in each write set" in blocked.facts.errors[0]
    assert not made.repairs


def test_a_rule_that_is_not_enforced_delays_nothing() -> None:
    [repair] = plan(B1, candidates=(B5, B6), is_enforced=False).repairs

    assert repair.target in {B5, B6}
