"""The ledger map is built by one scan and kept current by watches."""

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from auditor import ledger_map_updater
from auditor import ledger_map_updater as updater_module
from auditor.ledger_map_updater import CHANGES_PAUSE_S, GIVE_WAY_CHECK_S, GIVE_WAY_MAX_S
from ledgers.codec.layout import Layout
from ledgers.errors import SessionLostError, UnavailableError
from ledgers.store import Operation
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
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, ROOT

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


# --- Unreadable ledgers and directories stop nothing, and never count as deleted ------------------


@pytest.mark.compat(
    "G4",
    verdict="better",
    why="the ledger is reported by id and counted, and every other ledger is known",
)
@pytest.mark.parametrize("data", [b"rubbish", b""], ids=["rubbish", "truncated"])
async def test_rule_s8_an_unreadable_ledger_does_not_stop_the_scan(data: bytes) -> None:
    """It is reported."""
    ledgers = await with_ledgers(10)
    for ledger_id in (3, 8):
        await ledgers.damage(ledger_id, data)

    with capture_logs() as logs:
        async with keeping(ledgers) as updater:
            assert updater.ledger_map.unreadable == {3, 8}
            assert list(updater.ledger_map.naming_any([B1])) == [0, 1, 2, 4, 5, 6, 7, 9]
            assert len(updater.ledger_map) == 10
            await ledgers.damage(4, data)
            await soon(updater)
            assert updater.ledger_map.unreadable == {3, 4, 8}

    (told,) = [line for line in logs if line["event"] == "ledger_map.unreadable_ledgers"]
    assert (told["count"], told["ledger_ids"]) == (2, [3, 8])


async def test_znodes_that_are_no_ledgers_are_only_reported() -> None:
    ledgers = await with_ledgers(2)
    await ledgers.store.create(f"{ROOT}/00/0000/garbage")
    await ledgers.store.create(f"{ROOT}/00/stray")

    with capture_logs() as logs:
        async with keeping(ledgers) as updater:
            assert await soon(updater) == [0, 1]

    (told,) = [line for line in logs if line["event"] == "ledger_map.stray_znodes"]
    assert told["paths"] == [f"{ROOT}/00/stray", f"{ROOT}/00/0000/garbage"]


async def test_rule_s8_an_interrupted_scan_removes_nothing() -> None:
    """The scan is repeated."""
    ledgers = await with_ledgers(5)
    async with keeping(ledgers) as updater:
        listing, failures = updater.manager.ledger_ids, iter([True, True])

        async def break_off(*args, **options):  # type: ignore[no-untyped-def]
            async for ledger_ids in listing(*args, **options):
                if next(failures, False):
                    raise UnavailableError("broken off")
                yield ledger_ids

        updater.manager.ledger_ids = break_off  # type: ignore[method-assign]
        rescan(updater)
        await asyncio.sleep(updater_module.RETRY_MIN_S - 0.1)
        assert not updater.is_complete
        assert len(updater.ledger_map) == 5
        assert updater.completed_count == 1

        await asyncio.sleep(3 * updater_module.RETRY_MIN_S)
        assert updater.is_complete
        assert updater.completed_count == 2
        assert len(updater.ledger_map) == 5


async def test_rule_s8_an_unlisted_ledger_is_read_before_it_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_map_updater, "READS_AT_ONCE", 2)
    ledgers = await with_ledgers(9)
    async with keeping(ledgers) as updater:
        listing = updater.manager.ledger_ids

        async def forget_some(*args, **options):  # type: ignore[no-untyped-def]
            async for ledger_ids in listing(*args, **options):
                yield [i for i in ledger_ids if i not in (0, 3, 4, 8)]

        updater.manager.ledger_ids = forget_some  # type: ignore[method-assign]
        rescan(updater)
        assert await soon(updater) == list(range(9))
        assert updater.is_complete


EACH_SERVER = pytest.mark.parametrize(
    "is_stat_open", [True, False], ids=["older ZooKeeper", "3.9.5"]
)


@EACH_SERVER
async def test_denied_access_makes_a_ledger_unreadable_like_any_other(is_stat_open: bool) -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers, is_built=False) as updater:
        shut_out(store_of(updater), ledgers.manager.path(1), is_stat_open=is_stat_open)

        assert await soon(updater) == [0, 1, 2]
        assert updater.ledger_map.unreadable == {1}
        assert updater.is_complete


async def test_a_known_ledger_with_denied_access_is_kept_if_unchanged() -> None:
    """Its stat must be readable, and show that the ledger has not changed."""
    for is_stat_open, unreadable in ((True, set()), (False, {1})):
        ledgers = await with_ledgers(3)
        async with keeping(ledgers) as updater:
            shut = shut_out(store_of(updater), ledgers.manager.path(1), is_stat_open=is_stat_open)
            rescan(updater)
            await soon(updater)
            assert updater.ledger_map.unreadable == unreadable
            assert updater.take_touched() == unreadable
            rescan(updater)
            await soon(updater)
            assert updater.take_touched() == set()

            shut.clear()
            await asyncio.sleep(updater_module.UNREADABLE_AGAIN_S)
            assert list(updater.ledger_map.naming_any([B1])) == [0, 1, 2]


async def test_a_ledger_deleted_while_access_is_denied_is_removed() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers, is_built=False) as updater:
        shut_out(store_of(updater), ledgers.manager.path(1))
        await soon(updater)
        await ledgers.delete(1)

        assert await soon(updater) == [0, 2]
        assert updater.ledger_map.unreadable == set()


async def test_rule_s8_a_directory_with_denied_access_is_not_empty() -> None:
    """The other directories are read."""
    ledgers = await with_ledgers(3)
    beside = [10_000, 400_000]  # in the same tree, one listed with it, one later
    others = [*beside, *(i * 10**8 for i in range(1, 6))]
    for ledger_id in others:
        await ledgers.write(ledger_id)
    async with keeping(ledgers, is_built=False) as updater:
        shut = shut_out(store_of(updater), f"{ROOT}/00/0000")
        assert await soon(updater) == others
        assert (updater.is_complete, updater.completed_count) == (False, 1)
        assert updater.hidden == [f"{ROOT}/00/0000"]
        assert updater.is_gapless
        await asyncio.sleep(3 * updater_module.UNREADABLE_AGAIN_S)
        assert updater.completed_count == 1, "nothing was read again"

        shut.clear()
        await asyncio.sleep(updater_module.UNREADABLE_AGAIN_S)
        assert await soon(updater) == [0, 1, 2, *others]
        assert updater.is_complete
        assert updater.completed_count == 2
        assert updater.hidden == []

        shut.add(f"{ROOT}/00/0000")
        rescan(updater)
        assert await soon(updater) == [0, 1, 2, *others]
        assert (updater.is_complete, updater.completed_count) == (False, 3)

        await ledgers.delete(1)
        rescan(updater)
        assert await soon(updater) == [0, 2, *others], "known ledgers are read one by one"


async def test_denied_access_causes_no_repeated_reads_of_other_ledgers() -> None:
    ledgers = await with_ledgers(3)
    await ledgers.write(20_000)
    async with keeping(ledgers, is_built=False) as updater:
        store = store_of(updater)
        shut = shut_out(store, f"{ROOT}/00/0002")
        before = store.request_count
        await asyncio.sleep(3_600)
        assert await soon(updater) == [0, 1, 2]
        assert store.request_count - before < 100

        shut.clear()
        rescan(updater)
        assert await soon(updater) == [0, 1, 2, 20_000], "it need not wait"
        assert updater.is_complete


@EACH_SERVER
async def test_a_ledger_is_read_when_access_is_granted(is_stat_open: bool) -> None:
    """No write of the ledger tells the auditor to read it."""
    ledgers = await with_ledgers(3)
    async with keeping(ledgers, is_built=False) as updater:
        shut = shut_out(
            store_of(updater), *map(ledgers.manager.path, (0, 1)), is_stat_open=is_stat_open
        )
        await soon(updater)
        updater.take_touched()
        shut.remove(ledgers.manager.path(1))
        await asyncio.sleep(updater_module.UNREADABLE_AGAIN_S)

        assert updater.ledger_map.unreadable == {0}
        assert list(updater.ledger_map.naming_any([B1])) == [1, 2]
        assert updater.take_touched() == {1}


async def test_a_damaged_ledger_is_reported_once() -> None:
    """It may be read any number of times."""
    ledgers = await with_ledgers(3)
    await ledgers.damage(1)
    async with keeping(ledgers) as updater:
        await asyncio.sleep(3 * updater_module.UNREADABLE_AGAIN_S)

        assert updater.ledger_map.unreadable == {1}
        assert updater.take_touched() == set()
        assert updater.completed_count == 1


async def test_a_ledger_that_cannot_be_read_at_once_is_read_later() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:

        def lose_reads(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
            is_ours = store is store_of(updater) and not operations
            return Fault.LOST_REPLY if is_ours else None

        ledgers.tree.faults = lose_reads
        await ledgers.write(1, B1, B4)
        await asyncio.sleep(updater_module.RETRY_MIN_S / 2)
        assert list(updater.ledger_map.naming_any([B4])) == []

        ledgers.tree.faults = None
        await asyncio.sleep(updater_module.RETRY_MIN_S)
        assert list(updater.ledger_map.naming_any([B4])) == [1]
        assert updater.take_touched() == {1}


async def test_rule_s8_the_map_waits_for_a_lagging_server() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers, is_built=False) as updater:
        ledgers.tree.lag(store_of(updater))
        await ledgers.write(LONG)
        await ledgers.delete(0)

        assert await soon(updater) == [1, 2, LONG]
