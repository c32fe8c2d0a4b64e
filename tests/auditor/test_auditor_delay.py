"""The recovery delay and the disable switch: when the auditor acts."""

import asyncio
import itertools
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from auditor.absence import WRITE_S, read_delay
from auditor.marker import Take
from auditor.underreplication import BookieLosses
from ledgers.model import BookieId
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import (
    DELAY,
    SOON_S,
    count_audits,
    delayed,
    marked_soon,
    replicas,
    set_delay,
    with_ledgers,
)
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS
from tests.virtual_time import LoopClock

scene = partial(with_ledgers, (B1, B2))

# --- The recovery delay ---------------------------------------------------------------------------


async def test_the_first_leaders_delay_is_published_and_obeyed(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        assert (await cluster.store.get(DELAY))[0] == b"60"

    async with auditing(cluster, settings=delayed(0)):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == []
        assert (await cluster.store.get(DELAY))[0] == b"60"


@pytest.mark.compat("AuditorLedgerCheckerTest.testDelayedAuditOfLostBookies", verdict="same")
@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDelayedAuditWithMultipleBookieFailures",
    verdict="other",
    why="each bookie has its own delay; Java audits at once when a second bookie is absent",
)
async def test_each_lost_bookie_has_its_own_delay() -> None:
    """The mark of a ledger on both names both in the end."""
    cluster = await with_ledgers((B1, B2), (B2, B4))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.kill(B2)

        await asyncio.sleep(29)
        assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert (await cluster.marked(), await replicas(cluster, 0)) == ([0], (B1,))
        await asyncio.sleep(28)
        assert (await cluster.marked(), await replicas(cluster, 0)) == ([0], (B1,))
        await asyncio.sleep(2)
        assert (await cluster.marked(), await replicas(cluster, 0)) == ([0, 1], (B1, B2))


async def test_an_invalid_delay_is_logged_and_the_setting_counts_if_none_was_read() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(DELAY, b"-5", with_parents=True)
    with capture_logs() as logs:
        async with auditing(cluster, settings=delayed(30)):
            await cluster.kill(B1)
            await asyncio.sleep(28)
            assert await cluster.marked() == []
            await asyncio.sleep(4)
            assert await cluster.marked() == [0]

    [refusal] = [each for each in logs if each["event"] == "recovery_delay.unreadable"]
    assert (refusal["log_level"], refusal["used_s"]) == ("warning", 30)
    assert (await cluster.store.get(DELAY))[0] == b"-5"


async def test_a_delay_that_becomes_unreadable_stays_as_it_was_for_the_next_leader_too() -> None:
    """Its correction is no request to count absent bookies as lost."""
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(DELAY, b"3600", with_parents=True)
    async with auditing(cluster, settings=delayed(0)):
        await asyncio.sleep(5)
        await cluster.kill(B1)
        await cluster.store.set(DELAY, b"2h", version=-1)
        assert await marked_soon(cluster) == []
        await cluster.store.set(DELAY, b"3600", version=-1)
        assert await marked_soon(cluster) == []
        await cluster.store.set(DELAY, b"2h", version=-1)

    async with auditing(cluster, settings=delayed(0)):
        assert await marked_soon(cluster) == []
        await cluster.store.delete(DELAY)
        assert await marked_soon(cluster) == [0], "without the znode the setting counts"


async def test_a_bookie_back_within_the_delay_marks_nothing(cluster: Cluster) -> None:
    """Its delay starts again when it disappears again."""
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(50)
        await cluster.revive(B1)
        await asyncio.sleep(5)
        await cluster.kill(B1)

        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


@pytest.mark.parametrize(
    ("delay_s", "marked_after_s"),
    [
        pytest.param(
            0,
            20,
            id="no delay any more",
            marks=pytest.mark.compat(
                "AuditorLedgerCheckerTest.testRescheduleOfDelayedAuditOfLostBookiesToStartImmediately",
                "AuditorLedgerCheckerTest.testTriggerAuditorBySettingDelayToZeroWithPendingAuditTask",
                verdict="same",
            ),
        ),
        pytest.param(30, 30, id="a shorter delay"),
        pytest.param(
            200,
            200,
            id="a longer delay",
            marks=pytest.mark.compat(
                "AuditorLedgerCheckerTest.testRescheduleOfDelayedAuditOfLostBookiesToStartLater",
                verdict="better",
                why="the delay counts from when the bookie became absent, and does not restart",
            ),
        ),
    ],
)
async def test_a_changed_delay_applies_to_bookies_absent_already(
    cluster: Cluster, delay_s: int, marked_after_s: float
) -> None:
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(20)
        await set_delay(cluster, delay_s)

        if delay_s:
            await asyncio.sleep(marked_after_s - 20 - 1)
            assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testTriggerAuditorWithPendingAuditTask", verdict="same"
)
async def test_writing_the_same_delay_again_ends_the_wait() -> None:
    """Java's auditor does the same."""
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        audits = count_audits(leader)
        await cluster.kill(B1)
        await set_delay(cluster, 3600)

        assert await marked_soon(cluster) == [0]
        await cluster.kill(B2)
        assert await marked_soon(cluster) == [0], "it goes later, and waits as usual"
        await asyncio.sleep(3605)
        assert await cluster.marked() == [0, 1]
        assert len(audits) == 2


class TickingClock(LoopClock):
    """A clock on which no two readings are the same, like a real one."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now_s(self) -> float:
        return super().now_s() + next(self._ticks) * 1e-6


async def test_the_request_covers_a_bookie_first_seen_absent_with_it() -> None:
    cluster = await with_ledgers((B1, B3))
    cluster.clock = TickingClock()
    async with leading(cluster, settings=delayed(3600)) as leader:
        await leader.auditor.run_once()
        await cluster.kill(B1)
        leader.auditor.tracker._is_overruled = True

        await leader.auditor.run_once()

        assert await cluster.marked() == [0]


class ShiftedClock(LoopClock):
    shift_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.shift_s


async def test_a_bookie_lost_during_an_audit_is_found_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B3))
    cluster.clock = clock = ShiftedClock()
    async with leading(cluster, settings=delayed(60)) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await leader.auditor.run_once()
        clock.shift_s = 59
        settle = leader.auditor._settle

        async def settle_slowly(missing: BookieLosses) -> None:
            await settle(missing)
            clock.shift_s = 61

        monkeypatch.setattr(leader.auditor, "_settle", settle_slowly)
        assert await leader.auditor.run_once() == 0
        assert await cluster.marked() == []

        await leader.auditor.run_once()
        assert await cluster.marked() == [0]


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testTriggerAuditorWithNoPendingAuditTask", verdict="same"
)
async def test_an_audit_on_request_restores_deleted_marks() -> None:
    """No bookie is absent within its delay at that time."""
    cluster = await with_ledgers((B2, BookieId("never-seen:3181")))
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(61)
        assert await cluster.marked() == [0]
        await cluster.store.delete(PATHS.mark(0))

        await set_delay(cluster, 60)
        assert await marked_soon(cluster) == [0]


@pytest.mark.compat("AuditorLedgerCheckerTest.testDelayedAuditWithRollingUpgrade", verdict="same")
async def test_a_return_does_not_change_the_delay_of_another_bookie() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(50)
        await cluster.kill(B2)
        await cluster.revive(B1)

        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [1]


async def test_an_audit_requested_during_another_one_follows_it(cluster: Cluster) -> None:
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        audits = count_audits(leader)
        mark_stream, is_asked = leader.marker.mark_stream, False

        async def slowly(take: Take, **options: Any) -> int:
            nonlocal is_asked
            if not is_asked:
                is_asked = True
                await asyncio.sleep(10)
                await set_delay(cluster, 0)
                await asyncio.sleep(10)
            return await mark_stream(take, **options)

        leader.marker.mark_stream = slowly  # type: ignore[method-assign]
        await set_delay(cluster, 0)
        await asyncio.sleep(60)

        assert len(audits) == 2


async def test_a_deleted_delay_is_replaced_by_the_setting(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        await set_delay(cluster, 3600)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.store.delete(DELAY)
        await asyncio.sleep(32)

        assert await cluster.marked() == [0]


async def test_a_reconnection_makes_no_bookie_lost(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        cluster.tree.suspend(leader.store)
        await asyncio.sleep(5)
        cluster.tree.resume(leader.store)
        await asyncio.sleep(5)

        assert await cluster.marked() == []


# --- The switch -----------------------------------------------------------------------------------


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testDisableLedegerReplication", verdict="other"
)
@pytest.mark.compat("AuditorLedgerCheckerTest.testToggleLedgerReplication", verdict="same")
async def test_losses_while_disabled_are_marked_when_enabled(cluster: Cluster) -> None:
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.disable)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_disabled_auditor_waits_and_sends_no_requests(is_lost: bool) -> None:
    hour_s = 3600
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.disable)
    if is_lost:
        await cluster.kill(B1)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        await asyncio.sleep(hour_s)

        notes = hour_s / WRITE_S if is_lost else 0  # that the bookie is still away
        assert leader.store.request_count - before == notes


async def test_denied_access_to_the_delay_uses_the_setting(cluster: Cluster) -> None:
    """The term of the leader does not end."""
    await cluster.store.create(PATHS.recovery_delay, b"600", with_parents=True)
    shut_out(cluster.store, PATHS.recovery_delay)

    delay = await read_delay(cluster.store, PATHS, default_s=30)

    assert (delay.delay_s, delay.is_stored) == (30, False)
    assert delay.refusal
