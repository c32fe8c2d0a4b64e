"""Unclosed ledgers without a provable end, because their bookies were reformatted."""

import random

import pytest

from auditor.fsck.executor import recheck_ledger
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.appending import BookiePool
from ledgers.errors import UnprovenEndError
from ledgers.model import BookieId, LedgerState
from ledgers.placement import Candidate, RandomPlacement
from ledgers.recovery import recover_ledger
from tests.fsck.inspections import (
    ALL,
    executor,
    inspect_once,
    inspect_twice,
    one_ledger,
    options,
    told,
)
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, ROOT

METADATA, ENDS, SAMPLE, FULL = Level
OPEN, IN_RECOVERY, CLOSED = LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED
WHOLE = (Grade.WHOLE, ())
UNPROVEN = (Grade.UNKNOWN, (Finding.END_UNPROVEN,))
at_each_level = pytest.mark.parametrize("level", list(Level), ids=lambda level: level.value)


async def renew_cookies(cluster: Cluster, *bookies: BookieId) -> None:
    """Renew the cookies, as if the bookies had been reformatted and their copies repaired."""
    for bookie in bookies:
        await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
        await cluster.store.create(f"{ROOT}/cookies/{bookie}")


def doubted(verdict: LedgerVerdict | None) -> dict[BookieId | None, str]:
    assert verdict is not None
    return {
        each.bookie: each.code for each in verdict.evidence if each.finding is Finding.END_UNPROVEN
    }


@at_each_level
@pytest.mark.parametrize("state", [OPEN, IN_RECOVERY], ids=["open", "in recovery"])
@in_virtual_time
async def test_too_many_reformatted_bookies_make_the_end_unproven(
    state: LedgerState, level: Level
) -> None:
    cluster, _ = await one_ledger(state=state)
    await renew_cookies(cluster, B1, B2)

    verdict = await inspect_twice(cluster, level)

    assert told(verdict) == UNPROVEN
    assert doubted(verdict) == dict.fromkeys((B1, B2), "set_up_later")
    assert verdict is not None
    assert (verdict.is_wrong, verdict.rests_on_unknown) == (False, True)


@at_each_level
@pytest.mark.parametrize(
    ("state", "reformatted"),
    [
        pytest.param(OPEN, (), id="none"),
        pytest.param(OPEN, (B1,), id="one, and the others prove the end"),
        pytest.param(IN_RECOVERY, (B1,), id="one, in recovery"),
        pytest.param(OPEN, (B4, B5), id="other bookies"),
        pytest.param(CLOSED, ALL, id="closed: its end is known"),
    ],
)
@in_virtual_time
async def test_with_enough_original_bookies_the_end_is_proven(
    state: LedgerState, reformatted: tuple[BookieId, ...], level: Level
) -> None:
    cluster, _ = await one_ledger(state=state)
    await renew_cookies(cluster, *reformatted)

    assert told(await inspect_twice(cluster, level)) == WHOLE


async def with_latecomers(state: LedgerState = OPEN) -> Cluster:
    """Return a cluster in which the new B4 and B5 replaced B1 and B2 at entry 5."""
    cluster, _ = await one_ledger(ALL, (B4, B5, B3), starts=(0, 5), state=state)
    await renew_cookies(cluster, B4, B5)
    return cluster


@at_each_level
@in_virtual_time
async def test_new_replacement_bookies_do_not_count_as_reformatted(level: Level) -> None:
    cluster = await with_latecomers()

    assert told(await inspect_twice(cluster, level)) == WHOLE


@pytest.mark.parametrize(
    ("level", "is_seen"),
    [(METADATA, False), (ENDS, True), (SAMPLE, True), (FULL, True)],
    ids=lambda each: each.value if isinstance(each, Level) else "",
)
@in_virtual_time
async def test_a_replacement_bookie_without_its_first_entry_counts(
    level: Level, is_seen: bool
) -> None:
    cluster = await with_latecomers()
    for bookie in (B4, B5):
        cluster.bookie(bookie).lose(LEDGER, 5)

    verdict = await inspect_twice(cluster, level)

    assert doubted(verdict) == (dict.fromkeys((B4, B5), "lacks_first_entry") if is_seen else {})


@in_virtual_time
async def test_a_replacement_bookie_without_a_later_entry_is_fine() -> None:
    cluster = await with_latecomers()
    for bookie in (B4, B5):
        cluster.bookie(bookie).lose(LEDGER, 6)

    assert not doubted(await inspect_twice(cluster, FULL))


@in_virtual_time
async def test_an_absent_bookie_counts_only_beside_a_reformatted_one() -> None:
    """An absent bookie may return and prove the end."""
    cluster, _ = await one_ledger(state=OPEN)
    await cluster.kill(B2)
    assert not doubted(await inspect_once(cluster, METADATA))

    await renew_cookies(cluster, B1)
    assert doubted(await inspect_once(cluster, METADATA)) == {B1: "set_up_later"}


@in_virtual_time
async def test_a_ledger_closed_between_the_checks_has_an_end() -> None:
    cluster, _ = await one_ledger(state=OPEN)
    await renew_cookies(cluster, B1, B2)
    first = await inspect_once(cluster, FULL)
    found = await cluster.manager.read(LEDGER)
    closed = found.metadata.closed(last_entry_id=9, length=found.metadata.length)
    await cluster.manager.write(LEDGER, closed, read_as=found)

    second = await recheck_ledger(await executor(cluster, options(FULL)), first)

    assert (told(first), told(second)) == (UNPROVEN, WHOLE)


@pytest.mark.parametrize("reformatted", [(), (B1,), (B1, B2), (B2, B3), ALL])
@in_virtual_time
async def test_a_recovery_agrees_about_reformatted_bookies(
    reformatted: tuple[BookieId, ...],
) -> None:
    cluster, _ = await one_ledger(state=OPEN)
    await renew_cookies(cluster, *reformatted)
    verdict = await inspect_twice(cluster, FULL)

    assert await can_recover(cluster) is not bool(doubted(verdict))


@pytest.mark.parametrize("lost_entry_id", [5, 6], ids=["their first entry", "another"])
@in_virtual_time
async def test_a_recovery_agrees_about_replacement_bookies(lost_entry_id: int) -> None:
    cluster = await with_latecomers()
    for bookie in (B4, B5):
        cluster.bookie(bookie).lose(LEDGER, lost_entry_id)
    verdict = await inspect_twice(cluster, FULL)

    assert await can_recover(cluster) is not bool(doubted(verdict))


async def can_recover(cluster: Cluster) -> bool:
    """Return True if the daemon's recovery can close the ledger."""

    async def nobody() -> list[Candidate]:
        return []

    found = await cluster.manager.read(LEDGER)
    async with cluster.node() as node:
        try:
            await recover_ledger(
                found,
                manager=cluster.manager,
                bookies=cluster.bookies,
                pool=BookiePool(writable=nobody, placement=RandomPlacement(random.Random(1))),
                clock=cluster.clock,
                reformatted=node.views.current.initialised_after(found.stat.czxid),
            )
        except UnprovenEndError:
            return False
    return True
