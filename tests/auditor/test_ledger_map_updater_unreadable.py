"""Unreadable ledgers and directories stop nothing, and never count as deleted."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from auditor import ledger_map_updater
from auditor import ledger_map_updater as updater_module
from ledgers.errors import UnavailableError
from ledgers.store import Operation
from tests.auditor.ledger_map_scenes import keeping, rescan, soon, store_of, with_ledgers
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import shut_out
from tests.replication.ledger_values import B1, B4
from tests.replication.nodes import ROOT

LONG = 2**40


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
async def test_denied_access_makes_a_ledger_unreadable_like_any_other(
    is_stat_open: bool,
) -> None:
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
async def test_a_ledger_is_read_when_access_is_granted(
    is_stat_open: bool,
) -> None:
    """No write of the ledger tells the auditor to read it."""
    ledgers = await with_ledgers(3)
    async with keeping(ledgers, is_built=False) as updater:
        shut = shut_out(
            store_of(updater),
            *map(ledgers.manager.path, (0, 1)),
            is_stat_open=is_stat_open,
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
