"""Writes of this node's own worker are not read again; all other writes are."""

import asyncio
import random

import pytest

from auditor import ledger_map_updater as updater_module
from auditor.ledger_map_updater import RECENT_WRITES_MAX, RecentWrites
from ledgers.manager import VersionedMetadata
from ledgers.store import UNTOLD, Event, EventKind, Stat
from tests.auditor.ledger_map_scenes import (
    SOON_S,
    Ledgers,
    closed,
    contents,
    keeping,
    read_all,
    store_of,
    with_ledgers,
)
from tests.replication.ledger_values import B1, B2, B3, B4

SEED_COUNT = 100


def written(ledger_id: int, *, mzxid: int) -> VersionedMetadata:
    return VersionedMetadata(
        ledger_id=ledger_id, metadata=closed(B1, B2), stat=Stat(version=1, mzxid=mzxid), data=b""
    )


# --- Kept records ---------------------------------------------------------------------------------


def test_a_write_is_returned_once_and_only_for_its_transaction() -> None:
    own, mine = RecentWrites(), written(7, mzxid=5)
    own.keep(mine)

    assert own.take(7, 4) is None
    assert own.take(7, 6) is None
    assert own.take(8, 5) is None
    assert own.take(7, 5) is mine
    assert own.take(7, 5) is None


def test_the_last_write_of_a_ledger_is_kept() -> None:
    own, last = RecentWrites(), written(7, mzxid=6)
    own.keep(written(7, mzxid=5))
    own.keep(last)

    assert own.take(7, 5) is None
    assert own.take(7, 6) is last


def test_writes_that_are_not_asked_for_are_dropped_oldest_first() -> None:
    own = RecentWrites()
    for ledger_id in range(RECENT_WRITES_MAX + 1):
        own.keep(written(ledger_id, mzxid=5))

    assert own.take(0, 5) is None
    assert own.take(1, 5) is not None
    assert own.take(RECENT_WRITES_MAX, 5) is not None


def test_forgotten_writes_are_not_returned() -> None:
    own = RecentWrites()
    own.keep(written(7, mzxid=5))
    own.forget()

    assert own.take(7, 5) is None


# --- The ledger map -------------------------------------------------------------------------------


async def test_a_write_of_this_node_is_known_without_a_read() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        own.keep(await ledgers.write(1, B1, B4))
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before
        assert contents(updater) == await read_all(ledgers.manager)
        assert list(updater.ledger_map.naming_any([B4])) == [1]
        assert updater.take_touched() == {1}


async def test_writes_from_before_the_ledger_map_began_do_not_count() -> None:
    """A reinstalled ZooKeeper may have counted to the same transaction again."""
    ledgers, own = await with_ledgers(3), RecentWrites()
    stat = Stat(version=1, mzxid=(await ledgers.manager.read(2)).stat.mzxid + 1)
    own.keep(VersionedMetadata(ledger_id=1, metadata=closed(B1, B4), stat=stat, data=b""))
    async with keeping(ledgers, recent_writes=own) as updater:
        assert (await ledgers.write(1, B2, B3)).stat.mzxid == stat.mzxid
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)


async def test_a_later_write_of_another_node_is_read() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        own.keep(await ledgers.write(1, B1, B4))
        await ledgers.write(1, B2, B3)
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)
        assert list(updater.ledger_map.naming_any([B4])) == []


async def test_a_ledger_deleted_after_our_write_is_removed() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        own.keep(await ledgers.write(1, B1, B4))
        await ledgers.delete(1)
        await asyncio.sleep(SOON_S)

        assert contents(updater).keys() == {0, 2}


async def test_changes_without_events_after_our_write_are_read() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        own.keep(await ledgers.write(1, B1, B4))
        own.keep(await ledgers.write(2, B1, B4))
        # Both are told, and not looked at yet.
        await asyncio.sleep(updater_module.CHANGES_PAUSE_S / 2)
        ledgers.tree.suspend(store_of(updater))
        await ledgers.delete(1)
        await ledgers.write(2, B2, B3)
        ledgers.tree.resume(store_of(updater))
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)


async def test_an_event_that_arrives_after_its_change_costs_no_read() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        mine = await ledgers.write(1, B1, B4)
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        path = ledgers.manager.path(1)
        updater._handle(Event(kind=EventKind.CHANGED, path=path, zxid=mine.stat.mzxid), "")
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before


async def test_events_without_a_transaction_id_cause_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZooKeeper before 3.9 does not name the transaction."""
    handle = updater_module.LedgerMapUpdater._handle

    def of_an_old_server(updater: updater_module.LedgerMapUpdater, event: Event, tree: str) -> None:
        handle(updater, Event(kind=event.kind, path=event.path, zxid=UNTOLD), tree)

    monkeypatch.setattr(updater_module.LedgerMapUpdater, "_handle", of_an_old_server)
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        own.keep(await ledgers.write(1, B1, B4))
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before + 1
        assert contents(updater) == await read_all(ledgers.manager)


@pytest.mark.parametrize("seed", range(SEED_COUNT))
async def test_the_ledger_map_is_right_in_the_end(seed: int) -> None:
    """Random writes, deletions and lost connections, ours and other nodes', in any order."""
    rng = random.Random(seed)
    ledgers, own = await with_ledgers(4), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        for _ in range(30):
            await _something(rng, ledgers, own, updater)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0, 0.001, 0.02, 0.1)))
        ledgers.tree.resume(store_of(updater))
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager), seed


async def _something(
    rng: random.Random,
    ledgers: Ledgers,
    own: RecentWrites,
    updater: updater_module.LedgerMapUpdater,
) -> None:
    ledger_id = rng.randrange(4)
    match rng.choice(("ours", "ours", "ours late", "theirs", "gone", "off", "on")):
        case "ours":
            own.keep(await ledgers.write(ledger_id, *rng.sample((B1, B2, B3, B4), 2)))
        case "ours late":
            mine = await ledgers.write(ledger_id, *rng.sample((B1, B2, B3, B4), 2))
            asyncio.get_running_loop().call_later(rng.choice((0.01, 0.02, 0.05)), own.keep, mine)
        case "theirs":
            await ledgers.write(ledger_id, *rng.sample((B1, B2, B3, B4), 2))
        case "gone":
            if await ledgers.store.exists(ledgers.manager.path(ledger_id)) is not None:
                await ledgers.delete(ledger_id)
        case "off":
            ledgers.tree.suspend(store_of(updater))
        case "on":
            ledgers.tree.resume(store_of(updater))
