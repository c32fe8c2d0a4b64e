"""The recovery delay and the disable switch: when the auditor acts on what it knows."""

import asyncio
import itertools

import pytest
from structlog.testing import capture_logs

from auditor.absence import read_delay
from auditor.absence_tracker import WRITE_S
from auditor.marker import MarkSource
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
from tests.replication.cluster import in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS
from tests.virtual_time import LoopClock

# --- The recovery delay ---------------------------------------------------------------------------


@in_virtual_time
async def test_the_first_leader_publishes_its_delay_and_later_ones_obey_what_stands() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        assert (await cluster.store.get(DELAY))[0] == b"60"

    async with auditing(cluster, settings=delayed(0)):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == []
        assert (await cluster.store.get(DELAY))[0] == b"60"


@pytest.mark.compat("AuditorLedgerCheckerTest.testDelayedAuditOfLostBookies", verdict="same")
@in_virtual_time
async def test_each_lost_bookie_waits_out_its_own_delay() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.kill(B2)

        await asyncio.sleep(29)
        assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]
        await asyncio.sleep(28)
        assert await cluster.marked() == [0]
        await asyncio.sleep(2)
        assert await cluster.marked() == [0, 1]


@in_virtual_time
async def test_a_delay_that_is_none_is_logged_by_the_leader_which_counts_its_own() -> None:
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
    assert (refusal["log_level"], refusal["used_s"]) == ("error", 30)
    assert (await cluster.store.get(DELAY))[0] == b"-5"


@in_virtual_time
async def test_a_bookie_that_is_back_within_the_delay_marks_nothing_and_begins_anew() -> None:
    cluster = await with_ledgers((B1, B2))
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
            id="none any more",
            marks=pytest.mark.compat(
                "AuditorLedgerCheckerTest.testRescheduleOfDelayedAuditOfLostBookiesToStartImmediately",
                "AuditorLedgerCheckerTest.testTriggerAuditorBySettingDelayToZeroWithPendingAuditTask",
                verdict="same",
            ),
        ),
        pytest.param(30, 30, id="a shorter one"),
        pytest.param(
            200,
            200,
            id="a longer one",
            marks=pytest.mark.compat(
                "AuditorLedgerCheckerTest.testRescheduleOfDelayedAuditOfLostBookiesToStartLater",
                verdict="better",
                why="the delay counts from when the bookie became absent, and does not restart",
            ),
        ),
    ],
)
@in_virtual_time
async def test_a_delay_that_changes_counts_for_those_that_are_away_already(
    delay_s: int, marked_after_s: float
) -> None:
    cluster = await with_ledgers((B1, B2))
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
@in_virtual_time
async def test_as_with_java_a_delay_written_unchanged_asks_not_to_wait_any_longer() -> None:
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
    """No two looks at it give the same time, as of a real one."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now_s(self) -> float:
        return super().now_s() + next(self._ticks) * 1e-6


@in_virtual_time
async def test_who_is_seen_to_be_away_only_when_it_is_asked_for_is_not_waited_for_either() -> None:
    cluster = await with_ledgers((B1, B3))
    cluster.clock = TickingClock()
    async with leading(cluster, settings=delayed(3600)) as leader:
        await leader.auditor.run_once()
        await cluster.kill(B1)
        leader.auditor._tracker._is_overruled = True

        await leader.auditor.run_once()

        assert await cluster.marked() == [0]


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testTriggerAuditorWithNoPendingAuditTask", verdict="same"
)
@in_virtual_time
async def test_an_audit_that_is_triggered_while_nobody_is_away_makes_lost_marks_again() -> None:
    cluster = await with_ledgers((B2, BookieId("never-seen:3181")))
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(61)
        assert await cluster.marked() == [0]
        await cluster.store.delete(PATHS.mark(0))

        await set_delay(cluster, 60)
        assert await marked_soon(cluster) == [0]


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDelayedAuditWithMultipleBookieFailures",
    verdict="other",
    why="each bookie has its own delay; Java audits at once when a second bookie is absent",
)
@in_virtual_time
async def test_the_mark_of_a_ledger_on_two_that_go_one_after_the_other_names_both() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.kill(B2)

        await asyncio.sleep(29)
        assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await replicas(cluster, 0) == (B1,)
        await asyncio.sleep(30)
        assert await replicas(cluster, 0) == (B1, B2)


@pytest.mark.compat("AuditorLedgerCheckerTest.testDelayedAuditWithRollingUpgrade", verdict="same")
@in_virtual_time
async def test_one_that_comes_back_while_the_next_one_goes_leaves_that_its_own_delay() -> None:
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


@in_virtual_time
async def test_an_audit_that_is_asked_for_during_another_one_comes_after_it() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        audits = count_audits(leader)
        mark_stream, is_asked = leader.marker.mark_stream, False

        async def slowly(source: MarkSource) -> int:
            nonlocal is_asked
            if not is_asked:
                is_asked = True
                await asyncio.sleep(10)
                await set_delay(cluster, 0)
                await asyncio.sleep(10)
            return await mark_stream(source)

        leader.marker.mark_stream = slowly  # type: ignore[method-assign]
        await set_delay(cluster, 0)
        await asyncio.sleep(60)

        assert len(audits) == 2


@pytest.mark.parametrize("data", [b"", b"soon", b"-1"])
@in_virtual_time
async def test_a_delay_that_nobody_can_read_counts_as_the_settings(data: bytes) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(DELAY, data)
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_delay_that_somebody_deletes_counts_as_the_settings() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        await set_delay(cluster, 3600)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.store.delete(DELAY)
        await asyncio.sleep(32)

        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_reconnection_makes_nobody_lost() -> None:
    cluster = await with_ledgers((B1, B2))
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
    "TestLedgerUnderreplicationManager.testDisableLedegerReplication",
    verdict="other",
)
@pytest.mark.compat("AuditorLedgerCheckerTest.testToggleLedgerReplication", verdict="same")
@in_virtual_time
async def test_what_is_lost_while_it_is_disabled_is_marked_when_it_is_enabled() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.disable)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]


@pytest.mark.parametrize("is_lost", [False, True])
@in_virtual_time
async def test_while_it_is_disabled_the_auditor_waits_and_asks_nothing(is_lost: bool) -> None:
    hour_s = 3600
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.disable)
    if is_lost:
        await cluster.kill(B1)
    async with leading(cluster) as leader:
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        await asyncio.sleep(hour_s)

        notes = hour_s / WRITE_S if is_lost else 0  # that the bookie is still away
        assert leader.store.request_count - before == notes
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


@in_virtual_time
async def test_a_delay_that_acls_shut_away_is_the_settings_and_ends_no_term() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.recovery_delay, b"600", with_parents=True)
    shut_out(cluster.store, PATHS.recovery_delay)

    delay = await read_delay(cluster.store, PATHS, default_s=30)

    assert (delay.delay_s, delay.is_stored) == (30, False)
    assert delay.refusal
