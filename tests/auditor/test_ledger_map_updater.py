"""The ledger map is built by one scan and kept current by watches."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from auditor import ledger_map_updater
from auditor import ledger_map_updater as updater_module
from auditor.ledger_map_updater import CHANGES_PAUSE_S, GIVE_WAY_CHECK_S, GIVE_WAY_MAX_S
from ledgers.codec.layout import Layout
from ledgers.errors import SessionLostError
from tests.auditor.ledger_map_scenes import (
    SOON_S,
    contents,
    keeping,
    read_all,
    rescan,
    soon,
    store_of,
    with_ledgers,
)
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS

LONG = 2**40


@pytest.mark.compat("BookieLedgerIndexTest.testSimpleBookieLedgerMapping", verdict="same")
@pytest.mark.parametrize("layout", list(Layout))
async def test_all_ledgers_are_known_after_the_first_scan(layout: Layout) -> None:
    ledgers = await with_ledgers(25, layout)
    if layout in (Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL):
        await ledgers.write(LONG, B1, B4)

    async with keeping(ledgers) as updater:
        assert contents(updater) == await read_all(ledgers.manager)
        assert list(updater.ledger_map.naming_any([B1])) == sorted(await read_all(ledgers.manager))
        assert list(updater.ledger_map.naming_any([B3])) == list(range(25))
        assert updater.completed_count == 1
        assert updater.take_touched() == set()


async def test_a_cluster_without_ledgers_is_complete() -> None:
    async with keeping(await with_ledgers(0)) as updater:
        assert len(updater.ledger_map) == 0
        assert updater.completed_count == 1


@pytest.mark.parametrize("layout", list(Layout))
async def test_changes_of_a_ledger_are_known_at_once(layout: Layout) -> None:
    ledgers = await with_ledgers(3, layout)
    async with keeping(ledgers) as updater:
        await ledgers.write(1, B1, B4)
        await ledgers.write(7)
        await ledgers.delete(2)
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)
        assert list(updater.ledger_map.naming_any([B4])) == [1]
        assert updater.take_touched() == {1, 2, 7}
        assert updater.take_touched() == set()
        assert updater.completed_count == 1


async def test_changed_ledgers_wait_while_a_loss_is_handled() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        is_urgent = True
        updater.is_urgent = lambda: is_urgent
        await ledgers.write(1, B1, B4)
        await asyncio.sleep(CHANGES_PAUSE_S + GIVE_WAY_MAX_S / 2)
        assert list(updater.ledger_map.naming_any([B4])) == []

        is_urgent = False
        await asyncio.sleep(2 * GIVE_WAY_CHECK_S)
        assert list(updater.ledger_map.naming_any([B4])) == [1]


async def test_a_long_audit_does_not_stop_the_map() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        updater.is_urgent = lambda: True
        await ledgers.write(1, B1, B4)
        await asyncio.sleep(CHANGES_PAUSE_S + 2 * GIVE_WAY_MAX_S)
        assert list(updater.ledger_map.naming_any([B4])) == [1]

        await ledgers.write(2, B1, B4)  # within the same audit: no further wait
        await asyncio.sleep(CHANGES_PAUSE_S + GIVE_WAY_MAX_S / 2)
        assert list(updater.ledger_map.naming_any([B4])) == [1, 2]


async def test_no_change_waits_after_an_event_that_tells_nothing_new() -> None:
    """A ledger changed twice, and the read after the first event returned the second change."""
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        updater._stale.add(1, (await ledgers.manager.read(1)).stat.mzxid)
        await asyncio.sleep(SOON_S)

        assert REGISTRY.get_sample_value("bookmender_ledger_map_changes_waiting") == 0


async def test_a_ledger_in_a_new_directory_of_the_root_is_known_too() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        await ledgers.write(LONG)
        assert await soon(updater) == [0, 1, 2, LONG]

        await ledgers.delete(LONG)
        assert await soon(updater) == [0, 1, 2]
        await ledgers.write(LONG + 1)
        assert await soon(updater) == [0, 1, 2, LONG + 1]


async def test_changes_of_marks_and_locks_cost_no_read() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        await ledgers.store.create(PATHS.mark(1), with_parents=True)
        await ledgers.store.create(PATHS.lock(1), with_parents=True)
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before


@pytest.mark.compat(
    "BookieLedgerIndexTest.testEnsembleReformation",
    verdict="better",
    why="a watch reports the change, and only this ledger is read",
)
async def test_after_an_ensemble_change_old_and_new_bookies_name_it() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        await ledgers.append_segment(1, B2, B3, B4)
        await asyncio.sleep(SOON_S)

        assert list(updater.ledger_map.naming_any([B1])) == [0, 1, 2]
        assert list(updater.ledger_map.naming_any([B2])) == [0, 1, 2]
        assert list(updater.ledger_map.naming_any([B4])) == [1]
        assert store_of(updater).request_count == before + 1


@pytest.mark.compat("BookieLedgerIndexTest.testWithoutZookeeper", verdict="same")
async def test_without_zookeeper_the_ledger_map_is_not_complete() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers, is_built=False) as updater:
        ledgers.tree.suspend(store_of(updater))
        await asyncio.sleep(SOON_S)
        assert not updater.is_complete
        assert updater.completed_count == 0

        ledgers.tree.resume(store_of(updater))
        assert await soon(updater) == [0, 1, 2]
        assert updater.is_complete


async def test_changes_during_a_suspended_session_are_found_later() -> None:
    ledgers = await with_ledgers(5)
    async with keeping(ledgers) as updater:
        ledgers.tree.suspend(store_of(updater))
        await ledgers.write(1, B1, B4)
        await ledgers.write(9)
        await ledgers.delete(2)
        await asyncio.sleep(SOON_S)
        assert list(updater.ledger_map.naming_any([B4])) == []

        ledgers.tree.resume(store_of(updater))
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)
        assert updater.take_touched() == {1, 2, 9}
        assert updater.completed_count == 2


async def test_a_directory_deleted_without_an_event_leaves_no_ledger() -> None:
    ledgers = await with_ledgers(2)
    await ledgers.write(LONG)
    async with keeping(ledgers) as updater:
        ledgers.tree.suspend(store_of(updater))
        await ledgers.delete(LONG)
        ledgers.tree.resume(store_of(updater))

        assert await soon(updater) == [0, 1]


async def test_a_requested_rescan_reads_everything_again() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        rescan(updater)
        assert not updater.is_complete
        await asyncio.sleep(SOON_S)

        assert updater.is_complete
        assert updater.completed_count == 2
        assert updater.take_touched() == set()


async def test_ledgers_that_change_during_a_scan_are_right_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_map_updater, "READS_AT_ONCE", 3)
    monkeypatch.setattr(ledger_map_updater, "CHANGES_AT_ONCE", 2)
    ledgers = await with_ledgers(20)
    async with keeping(ledgers, is_built=False) as updater:
        for ledger_id in range(0, 20, 2):
            await ledgers.write(ledger_id, B2, B4)
            await ledgers.delete(ledger_id + 1)
            await ledgers.write(ledger_id + 100, B3, B4)
        await asyncio.sleep(20 * SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)
        assert updater.is_complete


async def test_too_many_changed_ledgers_make_all_ledgers_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updater_module, "TOUCHED_MAX", 5)
    ledgers = await with_ledgers(1)
    async with keeping(ledgers) as updater:
        for ledger_id in range(6):
            await ledgers.write(ledger_id)
        await asyncio.sleep(SOON_S)

        assert updater.completed_count == 2
        assert len(updater.take_touched()) <= 5


async def test_a_waiting_caller_is_told_of_a_change() -> None:
    ledgers = await with_ledgers(1)
    async with keeping(ledgers) as updater:
        seen = updater.change_count
        waiting = asyncio.create_task(updater.wait_change(seen))
        await asyncio.sleep(SOON_S)
        assert not waiting.done()

        await ledgers.write(0, B1, B4)
        await waiting
        assert updater.change_count > seen


async def test_the_updater_ends_with_the_session() -> None:
    ledgers = await with_ledgers(1)
    async with keeping(ledgers) as updater:
        running = asyncio.create_task(updater.run())
        ledgers.tree.expire(store_of(updater))

        with pytest.raises(ExceptionGroup) as ended:
            await running
        assert ended.group_contains(SessionLostError)
