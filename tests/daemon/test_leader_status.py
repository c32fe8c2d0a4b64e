"""``bookmender status`` reads the records of a bookmender leader."""

import asyncio
from dataclasses import replace

from structlog.testing import capture_logs

from auditor.backlog import UnavailableLedgers
from auditor.checks.records import KINDS, CheckRecord, CheckRun
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import NAMING_MAX_MS, StoredAbsences
from auditor.settings import AuditorSettings
from daemon.status.leader import (
    LeaderState,
    gather_leader,
    losses_due_ms,
)
from ledgers.model import BookieId
from replication import znodes
from replication.marks import read_marks
from tests.auditor.auditing import auditing
from tests.auditor.scenes import DELAY, SOON_S, delayed, with_ledgers
from tests.daemon.status_values import HEALTHY, changed, fact
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

CHECK = KINDS[0].name
BUILT = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=1_200)
RUN = CheckRun(started_ms=1, ledger_count=10, ledgers_left=30, active_ms=5_000)


async def gathered(cluster: Cluster, session_id: int | None, *absent: BookieId) -> LeaderState:
    marked = await read_marks(cluster.store, PATHS, await cluster.marked())
    return await gather_leader(
        visiting(cluster),
        leader_session_id=session_id,
        absent=absent,
        marked=marked,
        clock=cluster.clock,
    )


@in_virtual_time
async def test_an_absent_bookie_has_time_left_and_a_lost_one_a_cause() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(100)) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(60)
        before = await gathered(cluster, leader.store.session_id, B1)
        await asyncio.sleep(60)
        after = await gathered(cluster, leader.store.session_id, B1)

    [loss] = before.pending_losses
    assert loss.bookie == B1
    assert loss.lost_ms - loss.since_ms == 100_000
    assert (before.recovery_delay_s, before.by_cause) == (100, ())
    assert (after.pending_losses, after.by_cause) == ((), (("lost", 1),))
    assert before.untracked == after.untracked == frozenset()


@in_virtual_time
async def test_without_a_bookmender_leader_absences_are_untracked() -> None:
    cluster = await with_ledgers((B1, B2))
    assert (await gathered(cluster, None, B1)).untracked == frozenset(), "there is no delay"

    delay = znodes.recovery_delay_to_bytes(100)
    await cluster.store.create(DELAY, delay, with_parents=True)

    assert (await gathered(cluster, None, B1)).untracked == {B1}
    assert (await gathered(cluster, None, B1)).loss_due_ms == {B1: None}


@in_virtual_time
async def test_an_unreadable_recovery_delay_is_one_condition() -> None:
    """Java's shell writes any text it is given into the znode."""
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(DELAY, b"-5", with_parents=True)

    with capture_logs() as logs:
        state = await gathered(cluster, None)
        behind_java = await losses_due_ms(visiting(cluster), [B1], clock=cluster.clock)

    assert logs == []
    assert behind_java == {}
    why = "lostBookieRecoveryDelay is not a number of seconds (data=b'-5')"
    assert state.recovery_delay_error == why
    status = changed(HEALTHY, leader_state=state)
    assert fact(status, "RECOVERY_DELAY_UNREADABLE") == (
        f"{why}. A bookmender leader keeps the last delay that it read, or else uses 0 s."
    )


@in_virtual_time
async def test_marks_of_another_auditor_have_an_unknown_cause() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.mark(B1, ledger_id=0)

    assert (await gathered(cluster, None)).by_cause == (("unknown", 1),)


@in_virtual_time
async def test_records_of_an_earlier_leader_are_ignored() -> None:
    cluster = await with_ledgers((B1, B2))
    absences = StoredAbsences(since_ms={B1: cluster.clock.wall_ms()}, seen_ms=0)
    async with auditing(cluster, settings=AuditorSettings()) as leader:
        await leader.records.write(absences)
        await leader.records.write(BUILT)
        await asyncio.sleep(SOON_S)
        assert (await gathered(cluster, BUILT.session_id)).ledger_map == BUILT

        assert (await gathered(cluster, BUILT.session_id + 1)).ledger_map is None
    assert await gathered(cluster, None, B1) == LeaderState(), "Java leads"


@in_virtual_time
async def test_an_absence_that_the_leader_has_not_recorded_has_no_end() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        state = await gathered(cluster, BUILT.session_id, B1, B2)

    assert state.loss_due_ms == {B2: None}


@in_virtual_time
async def test_only_a_check_under_way_is_shown() -> None:
    cluster = await Cluster.start()
    path = PATHS.check(CHECK)
    await cluster.store.create(path, CheckRecord(running=RUN).to_json(), with_parents=True)
    [row] = (await gathered(cluster, 5)).checks
    assert (row.name, row.running) == (CHECK, RUN)

    await cluster.store.set(path, CheckRecord(last=RUN, last_ms=2).to_json(), version=-1)

    assert (await gathered(cluster, 5)).checks == ()


@in_virtual_time
async def test_records_of_a_later_release_are_ignored() -> None:
    cluster = await Cluster.start()
    for path in (PATHS.ledger_map, PATHS.check(CHECK), PATHS.absences):
        await cluster.store.create(path, b'{"version": 9}', with_parents=True)

    assert await gathered(cluster, 5, B1) == LeaderState()


@in_virtual_time
async def test_a_lost_bookie_has_the_count_of_ledgers_naming_it() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(100)) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        session_id = leader.store.session_id
        building = await gathered(cluster, session_id, B1, B2)
        await leader.records.write(replace(BUILT, session_id=session_id))
        built = await gathered(cluster, session_id, B1)

    assert (building.named_by, building.is_count_complete) == ({B1: 2}, False)
    assert (built.named_by, built.is_count_complete) == ({B1: 2}, True)
    assert (await gathered(cluster, None, B1)).named_by == {}, "Java leads"

    await asyncio.sleep(2 * NAMING_MAX_MS / 1000)
    assert (await gathered(cluster, session_id, B1)).named_by == {}, "an earlier leader's"


@in_virtual_time
async def test_the_leaders_count_has_an_age() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(1_000)) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        session_id = leader.store.session_id
        first = (await gathered(cluster, session_id, B1)).counted_age_s
        await asyncio.sleep(3)

        later = (await gathered(cluster, session_id, B1)).counted_age_s

    assert 2.9 < later - first < 3.1


@in_virtual_time
async def test_a_count_for_other_absent_bookies_is_ignored() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(100)) as leader:
        session_id = leader.store.session_id
        await leader.records.write(replace(BUILT, session_id=session_id))
        await cluster.kill(B1, B2)
        await asyncio.sleep(SOON_S)

        assert (await gathered(cluster, session_id, B1, B2)).unavailable == UnavailableLedgers(
            count=1, first=(0,), restored_by={B1: 1, B2: 1}
        )
        assert (await gathered(cluster, session_id, B1)).unavailable is None
        assert (await gathered(cluster, session_id, B1, B2, B3)).unavailable is None
        assert (await gathered(cluster, None, B1, B2)).unavailable is None, "Java leads"
