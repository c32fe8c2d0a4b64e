"""Copies that their target has no room for (rule S11)."""

import random
from collections.abc import Mapping
from dataclasses import replace

from ledgers.metadata import BookieId
from ledgers.placement import Candidate, RandomPlacement
from replication.planning.check import IndexFinding, Verdict
from replication.planning.entry_runs import EntryRuns
from replication.planning.plan import Plan, plan_repair
from replication.planning.targets import SMALL_COPY_BYTES, Targets
from replication.reasons import Reason
from tests.replication.ledger_values import B1, B2, B3, B4, B5, closed_ledger, fragment, survey_of

MEMBERS = (B1, B2, B3)
ENTRY_BYTES = SMALL_COPY_BYTES
SHARE_BYTES = 10 * ENTRY_BYTES
"""What each of the members has of the ledger, but for headers and digests."""
MORE_BYTES = SHARE_BYTES + ENTRY_BYTES


def plan(spare_bytes: Mapping[BookieId, int], *findings: IndexFinding) -> Plan:
    """Of a ledger with W 3; all but its members may receive."""
    targets = Targets(
        candidates={b: Candidate(bookie=b) for b in (*MEMBERS, *spare_bytes)},
        placement=RandomPlacement(random.Random(1)),
        spare_bytes=spare_bytes,
    )
    metadata = replace(closed_ledger(MEMBERS, write_quorum=3), length=10 * ENTRY_BYTES)
    return plan_repair(survey_of(findings, metadata), targets)


def lost(index: int) -> IndexFinding:
    return IndexFinding(
        fragment=fragment(MEMBERS, write_quorum=3), index=index, verdict=Verdict.LOST
    )


def test_rule_s11_a_copy_goes_to_a_bookie_that_has_room_for_all_of_it() -> None:
    (repair,) = plan({B4: SHARE_BYTES // 2, B5: MORE_BYTES}, lost(1)).repairs

    assert repair.target == B5
    assert SHARE_BYTES <= repair.byte_count < MORE_BYTES


def test_rule_s11_where_nobody_has_room_it_waits_and_says_why() -> None:
    (blocked,) = plan({B4: SHARE_BYTES // 2}, lost(1)).blocked

    assert blocked.reason is Reason.NO_TARGET
    assert "of 4 writable ones 3 already hold this part of the ledger" in blocked.detail
    assert "1 are short of room" in blocked.detail


def test_rule_s11_what_a_live_bookie_lacks_it_is_given_where_there_is_room_for_that() -> None:
    lacking = IndexFinding(
        fragment=fragment(MEMBERS, write_quorum=3),
        index=0,
        verdict=Verdict.MISSING,
        absent=EntryRuns((1, 2)),
    )

    in_place = plan({B1: 3 * ENTRY_BYTES, B4: MORE_BYTES}, lacking)
    elsewhere = plan({B1: ENTRY_BYTES, B4: MORE_BYTES}, lacking)

    assert [repair.target for repair in in_place.repairs] == [B1]
    assert [repair.target for repair in elsewhere.repairs] == [B4]
