"""Bookies that may receive copies, and the reasons if none may."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from ledgers.model import BookieId
from ledgers.placement import Candidate, PlacementPolicy, RackRule, RandomPlacement
from ledgers.registration import BookieView
from replication.cluster import ClusterView
from replication.copy_reader import CopyFinding, Verdict
from replication.entry_runs import EntryRuns
from replication.orders import DrainOrder, MaintenanceWindow, Orders
from replication.plan import Plan, plan_repair
from replication.reasons import Exclusion, Reason
from replication.targets import (
    SMALL_COPY_BYTES,
    SORTED_AGAIN_S,
    DiskSpaceSource,
    Targets,
    TargetSelector,
    exclusion_counts,
)
from tests.replication.cluster import Cluster, queue_empty, until
from tests.replication.ledger_values import (
    B1,
    B2,
    B3,
    B4,
    B5,
    B6,
    BOOKIES,
    closed_ledger,
    fragment,
    inspection_of,
    registered,
)
from tests.replication.nodes import working
from tests.virtual_time import LoopClock

GB = 10**9


class TestSpaces:
    """Disks with as much free space as a test sets."""

    __test__ = False

    def __init__(self, **free_bytes: int) -> None:
        self.free: dict[str, int] = free_bytes

    def free_bytes(self, bookie: BookieId) -> int | None:
        return self.free.get(bookie.partition(":")[0])

    def spare_bytes(self, bookie: BookieId) -> int | None:
        free_bytes = self.free_bytes(bookie)
        return None if free_bytes is None else free_bytes - GB

    def landed(self, bookie: BookieId, byte_count: int) -> None:
        self.free[bookie.partition(":")[0]] -= byte_count


def view(
    writable: Iterable[BookieId] = BOOKIES,
    *,
    draining: Iterable[BookieId] = (),
    absent: Iterable[BookieId] = (),
) -> ClusterView:
    return ClusterView(
        bookies=BookieView(
            writable=registered(writable),
        ),
        orders=Orders(
            draining={b: DrainOrder(since_ms=0) for b in draining},
            maintenance={b: MaintenanceWindow(since_ms=0, until_ms=1) for b in absent},
        ),
    )


def target_selector(disk_spaces: TestSpaces | None = None, **options: object) -> TargetSelector:
    placement = RandomPlacement(random.Random(1))
    return TargetSelector(placement, clock=LoopClock(), disk_spaces=disk_spaces, **options)  # type: ignore[arg-type]


async def test_rule_s11_an_excluded_bookie_is_named_with_its_rule() -> None:
    found = target_selector(TestSpaces(b4=GB - 1)).targets(
        view(draining=[B2], absent=[B3]), refused={B5}
    )

    assert found.barred == {
        B2: Exclusion.DRAINING,
        B3: Exclusion.MAINTENANCE,
        B4: Exclusion.SHORT_OF_SPACE,
        B5: Exclusion.REFUSED,
    }
    assert set(found.candidates) == set(BOOKIES) - {B2, B3, B4, B5}


async def test_copies_under_way_count_as_load_and_as_used_space() -> None:
    shared, seen = target_selector(TestSpaces(b1=2 * GB)), view()

    with shared.under_way(B1, GB // 2):
        assert shared.targets(seen).candidates[B1].load_bytes == GB // 2
        with shared.under_way(B1, GB):
            assert shared.targets(seen).barred == {B1: Exclusion.SHORT_OF_SPACE}

    assert shared.targets(seen).candidates[B1].load_bytes == 0


async def test_rule_s11_written_bytes_count_as_used_space() -> None:
    shared, seen = target_selector(TestSpaces(b1=2 * GB)), view()

    with shared.under_way(B1, GB):
        shared.landed(B1, GB // 2)

    found = shared.targets(seen)
    assert found.candidates[B1].load_bytes == 0
    assert B1 in found.having_room(GB // 2, {}).candidates
    assert found.having_room(GB // 2 + 1, {}).barred == {B1: Exclusion.SHORT_OF_SPACE}


async def test_rule_s11_a_copy_that_leaves_too_little_space_is_refused() -> None:
    shared = target_selector(TestSpaces(b1=2 * GB, b2=5 * GB))

    with shared.under_way(B1, GB // 2):
        found = shared.targets(view())
        assert B1 in found.having_room(GB // 2, {}).candidates
        assert found.having_room(GB // 2 + 1, {}).barred == {B1: Exclusion.SHORT_OF_SPACE}
        assert found.having_room(GB // 4, {B1: GB // 2}).barred == {B1: Exclusion.SHORT_OF_SPACE}
        assert found.having_room(5 * GB, {}).barred == dict.fromkeys(
            (B1, B2), Exclusion.SHORT_OF_SPACE
        )

    assert B1 in shared.targets(view()).having_room(GB, {}).candidates


async def test_a_bookie_with_space_again_is_a_target_again() -> None:
    disk_spaces = TestSpaces(b1=0)
    shared, seen = target_selector(disk_spaces), view()
    assert B1 in shared.targets(seen).barred
    disk_spaces.free["b1"] = 5 * GB

    await LoopClock().sleep(SORTED_AGAIN_S)

    assert shared.targets(seen).candidates[B1].free_bytes == 5 * GB


async def test_target_local_excludes_others_except_in_place() -> None:
    found = target_selector(local=B1, is_local_only=True).targets(view(draining=[B2]))

    assert set(found.candidates) == {B1}
    assert found.barred[B3] is Exclusion.NOT_LOCAL
    assert found.may_refill(B3)
    assert not found.may_refill(B2)


async def test_every_writable_bookie_may_replace_one_in_a_recovery() -> None:
    shared = target_selector(TestSpaces(b4=0), local=B1, is_local_only=True)

    found = shared.candidates(view([B1, B2, B3, B4, B5], draining=[B2], absent=[B3]))

    assert {candidate.bookie for candidate in found} == {B1, B5}


async def test_each_rule_without_target_is_named_with_its_number() -> None:
    found = target_selector(TestSpaces(b5=0)).targets(
        view([B1, B2, B3, B4, B5, B6], draining=[B4]), refused={B6}
    )

    assert exclusion_counts(found, {B1, B2, B3}) == (
        (Exclusion.MEMBER, 3),
        (Exclusion.REFUSED, 1),
        (Exclusion.SHORT_OF_SPACE, 1),
        (Exclusion.DRAINING, 1),
    )
    assert exclusion_counts(target_selector().targets(view()), {B1}) is None, "others are left"


# --- Copies for which their target has no space (rule S11) ----------------------------------------

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
            disk_spaces=cast(DiskSpaceSource, TestSpaces(b4=GB + 5 * SMALL_COPY_BYTES)),
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


# --- A plan obeys the racks, and names the rule that leaves no target -----------------------------

SEEDS = range(20)
RACKS = {B1: "/a", B2: "/b", B3: "/c", B4: "/a", B5: "/b", B6: "/c"}
"""B1, B2 and B3 hold a ledger with W 2: any two of them that follow each other share entries."""


def plan_on_racks(
    *lost: BookieId,
    candidates: Sequence[BookieId],
    is_enforced: bool = True,
    racks: Mapping[BookieId, str] = RACKS,
    seed: int = 0,
) -> Plan:
    findings = [
        CopyFinding(
            fragment=fragment(),
            index=index,
            verdict=Verdict.BOOKIE_ABSENT if bookie in lost else Verdict.GOOD,
        )
        for index, bookie in enumerate((B1, B2, B3))
    ]
    placement = PlacementPolicy(
        RackRule(is_enforced=is_enforced), random.Random(seed), locate=racks.__getitem__
    )
    targets = Targets(
        candidates={b: Candidate(bookie=b, rack=racks[b]) for b in candidates}, placement=placement
    )
    return plan_repair(inspection_of(findings), targets)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_goes_to_a_rack_that_satisfies_the_rule(seed: int) -> None:
    [repair] = plan_on_racks(B1, candidates=(B4, B5, B6), seed=seed).repairs

    assert repair.target == B4


@pytest.mark.parametrize("seed", SEEDS)
def test_two_lost_copies_do_not_go_to_the_same_rack(seed: int) -> None:
    repairs = plan_on_racks(B1, B2, candidates=(B4, B5, B6), seed=seed).repairs

    racks = [RACKS[B3], *(RACKS[repair.target] for repair in repairs)]
    assert sorted(racks) == ["/a", "/b", "/c"]


def test_the_rule_is_named_if_it_leaves_no_target() -> None:
    made = plan_on_racks(B1, candidates=(B5, B6))

    [blocked] = made.blocked
    assert blocked.reason is Reason.NO_TARGET
    assert "at least 2 racks in each write set" in blocked.facts.errors[0]
    assert not made.repairs


def test_a_rule_that_is_not_enforced_delays_nothing() -> None:
    [repair] = plan_on_racks(B1, candidates=(B5, B6), is_enforced=False).repairs

    assert repair.target in {B5, B6}
