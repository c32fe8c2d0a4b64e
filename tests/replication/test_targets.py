"""Bookies that may receive copies, and the reasons if none may."""

import random
from collections.abc import Iterable

from ledgers.model import BookieId
from ledgers.placement import RandomPlacement
from ledgers.registration import BookieView, RegisteredBookie
from replication.cluster import ClusterView
from replication.orders import DrainOrder, MaintenanceWindow, Orders
from replication.reasons import Exclusion
from replication.targets import SORTED_AGAIN_S, Targets, TargetSelector, exclusion_counts
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, BOOKIES
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
            writable={
                b: RegisteredBookie(bookie_id=b, address=None, czxid=1, is_writable=True)
                for b in writable
            }
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


async def test_a_refusal_of_one_ledger_does_not_exclude_the_bookie() -> None:
    shared, seen = target_selector(), view()

    shared.targets(seen, refused={B1})

    assert not shared.targets(seen).barred


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


def test_without_a_writable_bookie_no_rule_is_named() -> None:
    placement = RandomPlacement(random.Random(1))

    found = Targets(candidates={}, placement=placement)

    assert exclusion_counts(found, ()) == ()
