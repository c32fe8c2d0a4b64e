"""What this node's worker wrote is not read again, and nothing else is taken for that."""

import asyncio
import random

import pytest

from auditor import ledger_map_updater as keeper_module
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
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4

SEED_COUNT = 100


def written(ledger_id: int, *, mzxid: int) -> VersionedMetadata:
    return VersionedMetadata(
        ledger_id=ledger_id, metadata=closed(B1, B2), stat=Stat(version=1, mzxid=mzxid), data=b""
    )


# --- What is kept ------------------------------------------------------------------------------------


def test_what_was_written_is_had_once_by_its_transaction() -> None:
    own, mine = RecentWrites(), written(7, mzxid=5)
    own.keep(mine)

    assert own.take(7, 4) is None
    assert own.take(7, 6) is None
    assert own.take(8, 5) is None
    assert own.take(7, 5) is mine
    assert own.take(7, 5) is None


def test_of_a_ledger_the_last_write_is_kept() -> None:
    own, last = RecentWrites(), written(7, mzxid=6)
    own.keep(written(7, mzxid=5))
    own.keep(last)

    assert own.take(7, 5) is None
    assert own.take(7, 6) is last


def test_where_nobody_asks_the_oldest_go() -> None:
    own = RecentWrites()
    for ledger_id in range(RECENT_WRITES_MAX + 1):
        own.keep(written(ledger_id, mzxid=5))

    assert own.take(0, 5) is None
    assert own.take(1, 5) is not None
    assert own.take(RECENT_WRITES_MAX, 5) is not None


def test_what_is_forgotten_is_kept_no_more() -> None:
    own = RecentWrites()
    own.keep(written(7, mzxid=5))
    own.forget()

    assert own.take(7, 5) is None


# --- What the ledger map makes of it ----------------------------------------------------------------------


@in_virtual_time
async def test_what_this_node_wrote_is_known_without_a_read() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        own.keep(await ledgers.write(1, B1, B4))
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before
        assert contents(updater) == await read_all(ledgers.manager)
        assert updater.ledger_map.naming(B4) == [1]
        assert updater.take_touched() == {1}


@in_virtual_time
async def test_what_was_written_before_the_ledger_map_began_says_nothing() -> None:
    """As where ZooKeeper was set up anew meanwhile, and has counted to the same transaction
    again."""
    ledgers, own = await with_ledgers(3), RecentWrites()
    stat = Stat(version=1, mzxid=(await ledgers.manager.read(2)).stat.mzxid + 1)
    own.keep(VersionedMetadata(ledger_id=1, metadata=closed(B1, B4), stat=stat, data=b""))
    async with keeping(ledgers, recent_writes=own) as updater:
        assert (await ledgers.write(1, B2, B3)).stat.mzxid == stat.mzxid
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)


@in_virtual_time
async def test_what_another_wrote_after_it_is_read() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        own.keep(await ledgers.write(1, B1, B4))
        await ledgers.write(1, B2, B3)
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)
        assert updater.ledger_map.naming(B4) == []


@in_virtual_time
async def test_a_ledger_that_was_deleted_after_it_is_gone() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        own.keep(await ledgers.write(1, B1, B4))
        await ledgers.delete(1)
        await asyncio.sleep(SOON_S)

        assert contents(updater).keys() == {0, 2}


@in_virtual_time
async def test_what_happened_after_it_while_nothing_was_told_is_read() -> None:
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        own.keep(await ledgers.write(1, B1, B4))
        own.keep(await ledgers.write(2, B1, B4))
        await asyncio.sleep(
            keeper_module.CHANGES_PAUSE_S / 2
        )  # both are told, and not looked at yet
        ledgers.tree.suspend(store_of(updater))
        await ledgers.delete(1)
        await ledgers.write(2, B2, B3)
        ledgers.tree.resume(store_of(updater))
        await asyncio.sleep(SOON_S)

        assert contents(updater) == await read_all(ledgers.manager)


@in_virtual_time
async def test_an_event_that_comes_later_than_what_it_tells_of_costs_no_read() -> None:
    ledgers = await with_ledgers(3)
    async with keeping(ledgers) as updater:
        mine = await ledgers.write(1, B1, B4)
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        path = ledgers.manager.path(1)
        updater._handle(Event(kind=EventKind.CHANGED, path=path, zxid=mine.stat.mzxid), "")
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before


@in_virtual_time
async def test_where_the_server_does_not_say_which_write_it_was_all_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = keeper_module.LedgerMapUpdater._handle

    def of_an_old_server(updater: keeper_module.LedgerMapUpdater, event: Event, tree: str) -> None:
        handle(updater, Event(kind=event.kind, path=event.path, zxid=UNTOLD), tree)

    monkeypatch.setattr(keeper_module.LedgerMapUpdater, "_handle", of_an_old_server)
    ledgers, own = await with_ledgers(3), RecentWrites()
    async with keeping(ledgers, recent_writes=own) as updater:
        await asyncio.sleep(SOON_S)
        before = store_of(updater).request_count
        own.keep(await ledgers.write(1, B1, B4))
        await asyncio.sleep(SOON_S)

        assert store_of(updater).request_count == before + 1
        assert contents(updater) == await read_all(ledgers.manager)


@pytest.mark.parametrize("seed", range(SEED_COUNT))
@in_virtual_time
async def test_whatever_happens_the_ledger_map_is_right_in_the_end(seed: int) -> None:
    """Ours and others' writes, deletions and lost connections, in any order. ``seed``: of the
    order."""
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
    rng: random.Random, ledgers: Ledgers, own: RecentWrites, updater: keeper_module.LedgerMapUpdater
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
