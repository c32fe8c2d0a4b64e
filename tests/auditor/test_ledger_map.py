"""The ledger map compared with a simple one, and its memory."""

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
from auditor.ledger_map import LedgerMap
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.store import Stat
from tests.auditor.simple_ledger_map import SimpleLedgerMap

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
    with (
        patch.object(ledger_map, "BLOCK_MAX", 4),
        patch.object(ledger_map, "BLOCK_MAX", 3),
    ):
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


def test_reads_that_arrive_in_another_order_keep_the_newest() -> None:
    ledger_map = LedgerMap()
    newest = Stat(version=2, mzxid=20)

    assert ledger_map.put(1, three(NAMES[:3]), newest)
    assert not ledger_map.put(1, three(NAMES[3:]), Stat(version=1, mzxid=10))
    assert not ledger_map.put(1, three(NAMES[3:]), newest)
    assert not ledger_map.put_unreadable(1, newest)

    assert list(ledger_map.naming_any([NAMES[0]])) == [1]
    assert list(ledger_map.naming_any([NAMES[3]])) == []


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
def test_a_ledger_needs_150_bytes_at_most(
    is_ascending: bool,
) -> None:
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
