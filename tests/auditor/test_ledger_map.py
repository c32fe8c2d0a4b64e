"""The ledger map compared with a simple one, and its memory."""

import asyncio
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor import ledger_map
from auditor import ledger_map_updater as updater_module
from auditor.ledger_map import LedgerMap
from auditor.ledger_map_updater import RECENT_WRITES_MAX, RecentWrites
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
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
from tests.auditor.simple_ledger_map import SimpleLedgerMap
from tests.replication.ledger_values import B1, B2, B3, B4

NAMES = [BookieId(f"bookie-{number}:3181") for number in range(6)]
LAST_ID = 2**63 - 1
IDS = st.integers(0, 15) | st.sampled_from([2**31 - 1, 2**40, LAST_ID])


@st.composite
def metadata(draw: st.DrawFn) -> LedgerMetadata:
    size = draw(st.integers(1, 4))
    ensembles = draw(
        st.lists(
            st.lists(st.sampled_from(NAMES), min_size=size, max_size=size, unique=True),
            min_size=0,
            max_size=3,
        )
    )
    return LedgerMetadata(
        ensemble_size=size,
        write_quorum=draw(st.integers(1, size)),
        ack_quorum=1,
        state=draw(st.sampled_from(LedgerState)),
        length=draw(st.sampled_from([0, 1, 2**62])),
        segments=tuple(
            Segment(first_entry_id=number, ensemble=tuple(each))
            for number, each in enumerate(ensembles)
        ),
    )


AGES = st.integers(0, 12)
"""Number of changes since a read was made."""
CHANGES = st.one_of(
    st.tuples(st.just("put"), AGES, IDS, metadata()),
    st.tuples(st.just("put_unreadable"), AGES, IDS),
    st.tuples(st.just("remove"), AGES, IDS),
)


@contextmanager
def tiny_blocks() -> Iterator[None]:
    """Make the blocks so small that a few ledgers fill many of them."""
    with patch.object(ledger_map, "BLOCK_MAX", 4), patch.object(ledger_map, "BLOCK_MAX", 3):
        yield


@settings(max_examples=300, deadline=None)
@given(st.lists(CHANGES, max_size=80), IDS, st.integers(1, 10))
def test_it_agrees_with_a_simple_ledger_map(
    changes: list[tuple[Any, ...]], first: int, count_max: int
) -> None:
    ledger_map, simple = LedgerMap(), SimpleLedgerMap()

    with tiny_blocks():
        for number, (name, age, *arguments) in enumerate(changes):
            if name != "remove":
                arguments.append(Stat(version=0, czxid=number % 5, mzxid=50 + number - age))
            is_news = getattr(ledger_map, name)(*arguments)
            assert is_news == getattr(simple, name)(*arguments)

    assert len(ledger_map) == len(simple.ids)
    assert ledger_map.unreadable == simple.unreadable.keys()
    assert ledger_map.unreadable_count == len(simple.unreadable)
    assert ledger_map.bookies == simple.bookies
    assert ledger_map.open_ids == simple.open_ids
    assert ledger_map.ledger_ids(count_max=1_000) == simple.ids
    assert (
        ledger_map.ledger_ids(first, count_max=count_max)
        == [i for i in simple.ids if i >= first][:count_max]
    )
    assert ledger_map.ids_in(first, first + 5) == [i for i in simple.ids if first <= i < first + 5]
    for ledger_id in (*range(16), 2**31 - 1, 2**40, LAST_ID):
        assert ledger_map.get(ledger_id) == simple.ledgers.get(ledger_id)
    for bookie in NAMES:
        assert list(ledger_map.naming_any([bookie])) == simple.naming(bookie)
        assert ledger_map.naming_count(bookie) == len(simple.naming(bookie))


def test_a_readable_value_replaces_an_unreadable_one() -> None:
    """The version of the znode is the same."""
    ledger_map, stat = LedgerMap(), Stat(version=1, mzxid=10)
    assert ledger_map.put_unreadable(1, stat)

    assert not ledger_map.put(1, three(NAMES[3:]), Stat(version=0, mzxid=9))
    assert ledger_map.put(1, three(NAMES[:3]), stat)

    assert list(ledger_map.naming_any([NAMES[0]])) == [1]
    assert ledger_map.unreadable == set()


LEDGERS = 8_000


@pytest.mark.parametrize("is_ascending", [True, False], ids=["in order", "in any order"])
def test_a_ledger_needs_150_bytes_at_most(is_ascending: bool) -> None:
    """No two ledgers share an ensemble."""
    rng = random.Random(1)
    bookies = [BookieId(f"bookie-{number:03}.storage.example:3181") for number in range(400)]
    ids = range(LEDGERS) if is_ascending else rng.sample(range(LEDGERS), LEDGERS)
    ensembles = [rng.sample(bookies, 3) for _ in ids]
    tracemalloc.start()
    ledger_map = LedgerMap()
    for ledger_id, ensemble in zip(ids, ensembles, strict=True):
        ledger_map.put(ledger_id, three(ensemble), Stat(version=1, czxid=10**12, mzxid=10**12))
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert used_bytes / LEDGERS <= 150


def three(ensemble: list[BookieId]) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        last_entry_id=1,
        length=10**9,
        segments=(Segment(first_entry_id=0, ensemble=tuple(ensemble)),),
    )


def test_ledgers_opened_since_a_change_count_come_in_their_order() -> None:
    ledger_map = LedgerMap()
    opened = LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=0, ensemble=(NAMES[0],)),),
    )
    ledger_map.put(1, opened, Stat(version=0, mzxid=1))
    count = ledger_map.opened_count

    ledger_map.put(9, opened, Stat(version=0, mzxid=2))
    ledger_map.put(4, opened, Stat(version=0, mzxid=3))
    ledger_map.put(1, opened, Stat(version=1, mzxid=4))

    assert ledger_map.opened_since(count) == [9, 4]
    assert ledger_map.opened_since(ledger_map.opened_count) == []


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


async def test_events_without_a_transaction_id_cause_reads(monkeypatch: pytest.MonkeyPatch) -> None:
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
