"""Ledgers with an entry on absent bookies only, and how the leader counts them."""

import asyncio
from collections.abc import Collection, Sequence

import pytest

from auditor.backlog import (
    IDS_KEPT_MAX,
    RECOUNT_S,
    UnavailableLedgerCounter,
    UnavailableLedgers,
    has_unavailable_entry,
)
from auditor.ledger_map import LedgerMap, MappedLedger
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.store import Stat
from tests.auditor.ledger_map_scenes import SOON_S, closed, keeping, with_ledgers
from tests.replication.ledger_values import B1, B2, B3, B4

A, B, C, D = B1, B2, B3, B4


def ledger(
    *segments: tuple[int, Sequence[BookieId]], write_quorum: int, last: int | None
) -> LedgerMetadata:
    """Return a ledger of segments by first entry. Without a last entry it is open."""
    return LedgerMetadata(
        ensemble_size=len(segments[0][1]),
        write_quorum=write_quorum,
        ack_quorum=1,
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        last_entry_id=-1 if last is None else last,
        length=0 if last is None else last + 1,
        segments=tuple(Segment(first_entry_id=e, ensemble=tuple(each)) for e, each in segments),
    )


@pytest.mark.parametrize(
    ("metadata", "away", "is_so"),
    [
        pytest.param(ledger((0, (A, B)), write_quorum=2, last=9), [A, B], True, id="all of it"),
        pytest.param(ledger((0, (A, B)), write_quorum=2, last=9), [A], False, id="a copy is left"),
        pytest.param(ledger((0, (A, B)), write_quorum=1, last=9), [A], True, id="single copies"),
        pytest.param(
            ledger((0, (A, B, C)), write_quorum=2, last=9),
            [B, C],
            True,
            id="a third of the entries",
        ),
        pytest.param(
            ledger((0, (A, B, C)), write_quorum=2, last=9), [A, C], True, id="around the end"
        ),
        pytest.param(
            ledger((0, (A, B, C, D)), write_quorum=2, last=9), [A, C], False, id="no neighbours"
        ),
        pytest.param(
            ledger((0, (A, B, C)), write_quorum=3, last=9), [A, B], False, id="two of three"
        ),
        pytest.param(
            ledger((0, (A, B, C)), write_quorum=2, last=0),
            [B, C],
            False,
            id="one entry, on other bookies",
        ),
        pytest.param(
            ledger((0, (A, B, C)), write_quorum=2, last=0),
            [A, B],
            True,
            id="one entry, on an absent bookie",
        ),
        pytest.param(ledger((0, (A, B)), write_quorum=2, last=-1), [A, B], False, id="no entry"),
        pytest.param(
            ledger((0, (A, B)), write_quorum=2, last=None),
            [A, B],
            True,
            id="open: it may have some",
        ),
        pytest.param(
            ledger((0, (A, B, C)), (4, (A, D, C)), write_quorum=2, last=4),
            [C, D],
            True,
            id="the last segment has one entry, and starts with the second bookie",
        ),
        pytest.param(
            ledger((0, (A, B, C)), (4, (A, D, C)), write_quorum=2, last=4),
            [A, D],
            False,
            id="no entry there",
        ),
        pytest.param(
            ledger((0, (A, B)), (0, (A, C)), write_quorum=2, last=9),
            [A, B],
            False,
            id="a segment without entries",
        ),
    ],
)
def test_a_ledger_is_unavailable_if_a_whole_write_set_is_absent(
    metadata: LedgerMetadata, away: Collection[BookieId], is_so: bool
) -> None:
    """The write set must have entries."""
    ledger_map, stat = LedgerMap(), Stat(version=0, czxid=1, mzxid=1)
    ledger_map.put(7, metadata, stat)
    mapped = ledger_map.get(7)

    assert mapped == MappedLedger.of(7, metadata, stat)
    assert has_unavailable_entry(mapped, frozenset(away)) is is_so


async def test_they_are_counted_at_once_when_a_bookie_disappears() -> None:
    ledgers = await with_ledgers(0)
    for ledger_id, bookies in enumerate([(A, B), (A, B), (A, C), (C, D)]):
        await ledgers.write(ledger_id, *bookies)
    told: list[int | None] = []

    async with keeping(ledgers) as updater:
        counter = UnavailableLedgerCounter(
            updater, on_count=lambda: told.append(count_of(counter, counter.absent))
        )
        counting = asyncio.create_task(counter.run())
        for away in ([A], [A, B], [A, B, C], [D, C], []):
            counter.update(frozenset(away))
            assert counter.found_for(frozenset(away)) is None, "not counted yet"
            await asyncio.sleep(SOON_S)
        assert counter.found_for(frozenset([A])) is None, "of others than these"
        counting.cancel()

    assert told == [0, 2, 3, 1, 0]


async def test_changed_ledgers_are_counted_after_a_while() -> None:
    ledgers = await with_ledgers(0)
    away = frozenset([A, B])

    async with keeping(ledgers) as updater:
        counter = UnavailableLedgerCounter(updater, on_count=lambda: None)
        counting = asyncio.create_task(counter.run())
        counter.update(away)
        await asyncio.sleep(SOON_S)
        assert count_of(counter, away) == 0
        await ledgers.write(1, A, B)
        await asyncio.sleep(RECOUNT_S + SOON_S)
        assert count_of(counter, away) == 1
        counting.cancel()


async def test_a_bookie_that_disappears_during_a_count_is_included() -> None:
    ledgers = await with_ledgers(0)
    for ledger_id in range(3):
        await ledgers.write(ledger_id, A, B)

    async with keeping(ledgers) as updater:
        counter = UnavailableLedgerCounter(updater, on_count=lambda: None)
        counter.update(frozenset([A]))
        counting = asyncio.create_task(counter.run_once())
        await asyncio.sleep(0)
        counter.update(frozenset([A, B]))
        await counting
        await counter.run_once()

    assert count_of(counter, frozenset([A, B])) == 3


def count_of(counter: UnavailableLedgerCounter, away: Collection[BookieId]) -> int | None:
    found = counter.found_for(away)
    return None if found is None else found.count


async def test_some_are_named_with_the_bookies_that_restore_them() -> None:
    ledgers = await with_ledgers(0)
    of_two_segments = ledger((0, (A, B)), (3, (C, D)), write_quorum=2, last=9)
    for ledger_id, bookies in {1: (A, B), 2: (A, C), 4: (A, D)}.items():
        await ledgers.write(ledger_id, *bookies)
    await ledgers.manager.create(3, of_two_segments)

    async with keeping(ledgers) as updater:
        counter = UnavailableLedgerCounter(updater, on_count=lambda: None)
        found: list[UnavailableLedgers | None] = []
        for away in (frozenset([A, B, C]), frozenset([A, B, C, D])):
            counter.update(away)
            await counter.run_once()
            found.append(counter.found_for(away))

    assert found == [
        UnavailableLedgers(count=3, first=(1, 2, 3), restored_by={A: 3, B: 2, C: 1}),
        UnavailableLedgers(count=4, first=(1, 2, 3, 4), restored_by={A: 3, B: 1, C: 1, D: 1}),
    ]


async def test_of_very_many_the_first_are_named() -> None:
    ledgers = await with_ledgers(0)
    for ledger_id in range(IDS_KEPT_MAX + 5):
        await ledgers.write(ledger_id, A, B)

    async with keeping(ledgers) as updater:
        counter = UnavailableLedgerCounter(updater, on_count=lambda: None)
        counter.update(frozenset([A, B]))
        await counter.run_once()

    found = counter.found_for(frozenset([A, B]))
    assert found is not None
    assert (found.count, found.first) == (IDS_KEPT_MAX + 5, tuple(range(IDS_KEPT_MAX)))


def test_ledgers_of_several_bookies_are_found_block_by_block() -> None:
    ledger_map = LedgerMap()
    for ledger_id in range(5_000):
        bookies = (A, B) if ledger_id % 3 == 0 else (A, C) if ledger_id % 3 == 1 else (C, D)
        ledger_map.put(ledger_id, closed(*bookies), Stat(version=0, czxid=1, mzxid=1))

    found: list[int] = []
    first: int | None = 0
    parts = 0
    while first is not None:
        part, first = ledger_map.naming_several(
            [A, B, BookieId("nobody")], count_least=2, first=first
        )
        found += part
        parts += 1

    assert found == list(range(0, 5_000, 3))
    assert parts > 4
    assert ledger_map.naming_several([A, BookieId("nobody")], count_least=2) == ([], None)
