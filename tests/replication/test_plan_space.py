"""Copies for which their target has no space (rule S11)."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from ledgers.model import BookieId
from ledgers.placement import Candidate, RandomPlacement
from replication.copy_reader import CopyFinding, Verdict
from replication.entry_runs import EntryRuns
from replication.plan import Plan, plan_repair
from replication.reasons import Exclusion, Reason
from replication.targets import SMALL_COPY_BYTES, DiskSpaceSource, Targets, TargetSelector
from tests.replication.cluster import Cluster, queue_empty, until
from tests.replication.ledger_values import (
    B1,
    B2,
    B3,
    B4,
    B5,
    closed_ledger,
    fragment,
    inspection_of,
)
from tests.replication.nodes import working

MEMBERS = (B1, B2, B3)
ENTRY_BYTES = SMALL_COPY_BYTES
SHARE_BYTES = 10 * ENTRY_BYTES
"""The bytes of the ledger on each member, without headers and digests."""
MORE_BYTES = SHARE_BYTES + ENTRY_BYTES


def plan(
    spare_bytes: Mapping[BookieId, int],
    *findings: CopyFinding,
    entry_bytes: int = ENTRY_BYTES,
    **fields: Any,
) -> Plan:
    """Return the plan for a ledger with write quorum 3. All bookies except its members may be
    targets."""
    targets = Targets(
        candidates={
            b: Candidate(bookie=b)
            for b in (*MEMBERS, *spare_bytes)
            if b not in fields.get("barred", ())
        },
        placement=RandomPlacement(random.Random(1)),
        spare_bytes=spare_bytes,
        **fields,
    )
    metadata = replace(closed_ledger(MEMBERS, write_quorum=3), length=10 * entry_bytes)
    return plan_repair(inspection_of(findings, metadata), targets)


def lost(index: int) -> CopyFinding:
    return CopyFinding(
        fragment=fragment(MEMBERS, write_quorum=3), index=index, verdict=Verdict.BOOKIE_ABSENT
    )


def test_rule_s11_a_copy_goes_to_a_bookie_with_space_for_it() -> None:
    (repair,) = plan({B4: SHARE_BYTES // 2, B5: MORE_BYTES}, lost(1)).repairs

    assert repair.target == B5
    assert SHARE_BYTES <= repair.byte_count < MORE_BYTES


def test_rule_s11_without_space_a_copy_waits_with_a_reason() -> None:
    (blocked,) = plan({B4: SHARE_BYTES // 2}, lost(1)).blocked

    assert blocked.reason is Reason.NO_TARGET
    assert blocked.facts.excluded == ((Exclusion.MEMBER, 3), (Exclusion.SHORT_OF_SPACE, 1))


def test_rule_s11_a_copy_in_place_needs_space_too() -> None:
    lacking = CopyFinding(
        fragment=fragment(MEMBERS, write_quorum=3),
        index=0,
        verdict=Verdict.MISSING,
        absent=EntryRuns((1, 2)),
    )

    in_place = plan({B1: 3 * ENTRY_BYTES, B4: MORE_BYTES}, lacking)
    elsewhere = plan({B1: ENTRY_BYTES, B4: MORE_BYTES}, lacking)

    assert [repair.target for repair in in_place.repairs] == [B1]
    assert [repair.target for repair in elsewhere.repairs] == [B4]


def test_rule_s11_small_copies_of_one_ledger_count_together() -> None:
    entry_bytes = SMALL_COPY_BYTES // 20
    segments = [
        CopyFinding(
            fragment=fragment(MEMBERS, first=10 * n, last=10 * n + 9, write_quorum=3),
            index=1,
            verdict=Verdict.BOOKIE_ABSENT,
        )
        for n in range(10)
    ]

    made = plan({B4: 2 * SMALL_COPY_BYTES}, *segments, entry_bytes=entry_bytes)

    assert len(made.repairs) == 3
    assert len(made.blocked) == 7


def test_rule_s11_a_local_copy_in_place_needs_space_too() -> None:
    """Also where only the local bookie may be a target."""
    lacking = CopyFinding(
        fragment=fragment(MEMBERS, write_quorum=3),
        index=1,
        verdict=Verdict.MISSING,
        absent=EntryRuns((1,)),
    )
    barred = {B2: Exclusion.NOT_LOCAL}

    short = plan({B2: -1}, lacking, barred=barred, only_local=B4, entry_bytes=10)
    enough = plan({B2: 1}, lacking, barred=barred, only_local=B4, entry_bytes=10)

    assert [repair.target for repair in short.repairs] != [B2]
    assert [repair.target for repair in enough.repairs] == [B2]


class DiskSpaces:
    """Disks of which only B4's are nearly full."""

    def free_bytes(self, bookie: BookieId) -> int | None:
        return None

    def spare_bytes(self, bookie: BookieId) -> int | None:
        return 5 * SMALL_COPY_BYTES if bookie == B4 else None

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        pass


async def test_rule_s11_ledgers_planned_together_count_together() -> None:
    """Each has two segments, which are copied side by side."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    for ledger_id in range(10):
        await cluster.write_ledger(
            MEMBERS,
            MEMBERS,
            ledger_id=ledger_id,
            starts=(0, 10),
            last=19,
            write_quorum=3,
            length=4 * SMALL_COPY_BYTES,
        )
        await cluster.mark(B2, ledger_id=ledger_id)
    await cluster.kill(B2)
    under_way, landed, seen = Counter[BookieId](), Counter[BookieId](), []

    class Watched(TargetSelector):
        @contextmanager
        def under_way(self, bookie: BookieId, byte_count: int) -> Iterator[None]:
            under_way[bookie] += byte_count
            seen.append(under_way[bookie])
            with super().under_way(bookie, byte_count):
                yield
            under_way[bookie] -= byte_count

        def landed(self, bookie: BookieId, byte_count: int) -> None:
            landed[bookie] += byte_count

    async with cluster.node() as node:
        node.repairer.copier.target_selector = Watched(
            RandomPlacement(random.Random(1)),
            clock=cluster.clock,
            disk_spaces=cast(DiskSpaceSource, DiskSpaces()),
        )
        async with working(node):
            await until(cluster, lambda: queue_empty(cluster))

    assert max(seen) <= 5 * SMALL_COPY_BYTES
    assert landed.keys() == {B4}
    stored = (
        await cluster.bookies.read(B4, ledger_id, entry_id)
        for ledger_id in range(10)
        for entry_id in range(20)
    )
    assert landed[B4] == sum([len(each) async for each in stored])
    await cluster.assert_whole(*range(10))
