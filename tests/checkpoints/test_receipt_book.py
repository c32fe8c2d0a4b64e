"""The decisions of the recovery that need no store: tables, stale receipts, merged receipts."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.errors import PositionUnknownError
from checkpoints.model import Checkpoint, Span, ledger_id_of, ledger_key
from checkpoints.receipt_book import ReceiptBook
from checkpoints.receipts import RangeMerger, RangeSet, ReceiptRange
from ledgers.errors import CorruptionError


def checkpoint(previous_id: int, id: int, *spans: Span) -> Checkpoint:
    return Checkpoint(id=id, previous_id=previous_id, time_ms=0, spans=spans)


def span(ledger_id: int, end: int) -> Span:
    return Span(ledger_key(ledger_id), 0, end, end)


def missed(book: ReceiptBook, *, now_s: float = 0.0) -> dict[int, int]:
    found: dict[int, int] = {}
    while (committed := book.take_missed(now_s=now_s)) is not None:
        ledger_id = ledger_id_of(committed.key)
        assert ledger_id is not None
        assert ledger_id not in found
        found[ledger_id] = committed.version
    return found


def test_tables_are_rebuilt_without_losing_objects() -> None:
    """Many objects come and go, more than a table holds before it is rebuilt."""
    rng = random.Random(1)
    book = ReceiptBook(low_watermark=0)
    book.end_recovery()
    pending: dict[int, int] = {}
    last_id = 0
    for _ in range(1_500):
        ledger_ids = rng.sample(range(3_000), 5)
        spans = [span(each, last_id + number) for number, each in enumerate(ledger_ids, start=1)]
        book.add(checkpoint(last_id, last_id + 5, *spans), now_s=0.0)
        last_id += 5
        pending |= {each: found.end for each, found in zip(ledger_ids, spans, strict=True)}
        for ledger_id in rng.sample(sorted(pending), min(len(pending), rng.choice([0, 5, 9]))):
            book.submit(ledger_key(ledger_id), pending.pop(ledger_id))
        if (unstored := book.unstored()) is not None:
            book.mark_stored(unstored)

    assert book.pending_count == len(pending)
    book.offer_again(shared_until_s=0.0)
    assert missed(book) == pending
    assert book.low_watermark is not None
    assert book.low_watermark < min(pending.values())


def test_taking_goes_on_while_the_table_is_rebuilt() -> None:
    book = ReceiptBook(low_watermark=0)
    for start in range(18_000, -1, -2_000):
        spans = [span(start + number, start + number + 1) for number in range(2_000)]
        book.recover(checkpoint(start, start + 2_000, *spans))
    book.end_recovery()
    taken = []

    while (committed := book.take_missed(now_s=0.0)) is not None:
        taken.append(committed.version)
        book.submit(committed.key, committed.version)

    assert sorted(taken) == list(range(1, 20_001))
    assert book.pending_count == 0
    assert book.low_watermark == 20_000


@pytest.mark.parametrize(
    ("low_watermark", "receipts"),
    [
        pytest.param(15, [], id="the low watermark lies within a checkpoint"),
        pytest.param(10, [ReceiptRange(21, 25)], id="a receipt ends within one"),
        pytest.param(10, [ReceiptRange(25, 30)], id="a receipt begins within one"),
        pytest.param(10, [ReceiptRange(15, 25)], id="a receipt lies in two"),
    ],
)
def test_receipts_for_other_checkpoints_with_the_same_zxids_are_noticed(
    low_watermark: int, receipts: list[ReceiptRange]
) -> None:
    """A restored ZooKeeper hands out zxids again, and the leader cuts other checkpoints."""
    book = ReceiptBook(low_watermark=low_watermark, receipts=receipts)

    def recover() -> None:
        for previous_id in (30, 20, 10):
            book.recover(checkpoint(previous_id, previous_id + 10))

    with pytest.raises(PositionUnknownError):
        recover()


def test_a_change_beyond_its_checkpoint_is_refused() -> None:
    book = ReceiptBook(low_watermark=0)

    with pytest.raises(CorruptionError):
        book.recover(checkpoint(0, 10, span(1, 11)))


def test_receipts_that_the_source_does_not_know_yet_are_kept() -> None:
    """The log of a process that starts may lag behind that of the process before."""
    book = ReceiptBook(low_watermark=10, receipts=[ReceiptRange(21, 30)])
    book.recover(checkpoint(10, 20, span(1, 20), span(2, 15)))
    book.end_recovery()

    assert book.add(checkpoint(20, 30, span(2, 25)), now_s=0.0) == ()
    assert missed(book) == {1: 20}
    book.submit(ledger_key(1), 20)
    assert book.low_watermark == 30


def test_a_receipt_of_what_the_filter_leaves_out_subsumes_nothing() -> None:
    """A change that the client does not want to see does not subsume an earlier one."""
    book = ReceiptBook(
        low_watermark=10, receipts=[ReceiptRange(21, 30)], wanted=lambda span: span.end < 20
    )
    book.recover(checkpoint(10, 20, span(1, 15)))
    book.end_recovery()

    assert book.add(checkpoint(20, 30, span(1, 25)), now_s=0.0) == ()
    assert missed(book) == {1: 15}


def test_a_watermark_ahead_of_the_source_is_kept() -> None:
    book = ReceiptBook(low_watermark=30)
    assert not book.recover(checkpoint(10, 20, span(1, 20)))
    book.end_recovery()

    assert book.add(checkpoint(20, 30, span(1, 25)), now_s=0.0) == ()
    assert [each.end for each in book.add(checkpoint(30, 40, span(1, 35)), now_s=0.0)] == [35]


def test_many_separate_receipts_are_looked_up_quickly() -> None:
    """Each second checkpoint has a receipt. A search through all of them would take minutes."""
    count = 20_000
    stored = [ReceiptRange(20 * each + 11, 20 * each + 20) for each in range(count)]
    book = ReceiptBook(low_watermark=0, receipts=stored)
    for each in reversed(range(2 * count)):
        book.recover(checkpoint(10 * each, 10 * each + 10, span(each, 10 * each + 10)))
    book.end_recovery()

    assert book.missed_count == count


# --- Merging of receipts --------------------------------------------------------------------------


RANGES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 20)).map(
        lambda pair: ReceiptRange(pair[0], pair[0] + pair[1])
    )
)


def ids(ranges: list[ReceiptRange]) -> set[int]:
    return {id for begin, end in ranges for id in range(begin, end + 1)}


def are_apart(ranges: list[ReceiptRange]) -> bool:
    """Return True if ascending ranges neither overlap nor touch."""
    return all(lower.end + 1 < higher.begin for lower, higher in itertools.pairwise(ranges))


@given(RANGES)
def test_merged_receipts_cover_the_same_ids(ranges: list[ReceiptRange]) -> None:
    merged = RangeMerger(sorted(ranges, reverse=True)).ranges

    assert ids(merged) == ids(ranges)
    assert are_apart(merged)


@given(RANGES)
def test_joined_ranges_are_those_that_several_receipts_form(ranges: list[ReceiptRange]) -> None:
    merger = RangeMerger(sorted(ranges, reverse=True))

    for each in merger.ranges:
        within = [row for row in ranges if each.begin <= row.begin and row.end <= each.end]
        assert (each in merger.joined) == (len(within) > 1)


def test_a_receipt_may_reach_beyond_several_that_began_after_it() -> None:
    rows = [(80, 89), (50, 59), (30, 39), (20, 55), (5, 9)]

    merged = RangeMerger(ReceiptRange(*each) for each in rows).ranges

    assert merged == [(5, 9), (20, 59), (80, 89)]


@pytest.mark.parametrize("seed", range(20))
def test_adding_in_any_order_leaves_one_range(seed: int) -> None:
    """Neighbouring parts of a whole, each added once."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 1_000), 200))
    parts = [ReceiptRange(lower + 1, upper) for lower, upper in itertools.pairwise(cuts)]
    rng.shuffle(parts)
    added = RangeSet()

    for number, part in enumerate(parts, start=1):
        merged = added.add(part)
        assert merged.begin <= part.begin
        assert part.end <= merged.end
        assert added.beginning_at(merged.begin) == merged
        assert ids(list(added)) == ids(parts[:number])
        assert are_apart(list(added))

    assert list(added) == [(cuts[0] + 1, cuts[-1])]


def test_a_removed_range_is_gone() -> None:
    ranges = RangeSet([ReceiptRange(1, 5), ReceiptRange(10, 15)])

    ranges.remove(ReceiptRange(1, 5))

    assert list(ranges) == [(10, 15)]
    assert ranges.add(ReceiptRange(6, 9)) == (6, 15)
