"""The chain of the feed's ledgers."""

from dataclasses import replace

from checkpoints.chain import NO_FEED, FeedChain, Kind, Segment


def log(ledger_id: int, previous_id: int, begun_s: int) -> Segment:
    return Segment(
        ledger_id=ledger_id, kind=Kind.LOG, previous_id=previous_id, begun_ms=begun_s * 1000
    )


def base(ledger_id: int, previous_id: int) -> Segment:
    return Segment(ledger_id=ledger_id, kind=Kind.BASE, previous_id=previous_id, begun_ms=0)


CHAIN = FeedChain(
    is_enabled=True,
    generation=1,
    changed_ms=1,
    retention_s=100,
    segments=(log(1, 0, 0), log(2, 10, 50), base(3, 25), log(4, 20, 100), log(5, 30, 200)),
)


def test_the_chain_is_read_as_it_was_written() -> None:
    assert FeedChain.parse(CHAIN.to_json()) == CHAIN


def test_only_ledgers_that_are_old_and_in_the_base_are_deleted() -> None:
    at_160 = CHAIN.retained(160_000)
    assert [each.ledger_id for each in at_160.logs] == [2, 4, 5]
    assert at_160.deleting == (1,)

    assert [each.ledger_id for each in CHAIN.retained(9_999_000).logs] == [4, 5]


def test_a_clock_that_stepped_back_makes_no_gap_in_the_log() -> None:
    segments = (log(1, 0, 0), log(2, 10, 900), log(3, 20, 200), log(4, 30, 950), base(5, 40))
    chain = replace(CHAIN, segments=segments).retained(600_000)

    assert [each.ledger_id for each in chain.logs] == [1, 2, 3, 4]


def test_a_large_chain_drops_the_oldest_ledgers_that_are_in_the_base() -> None:
    logs = tuple(log(n, n * 10, n) for n in range(1_000))
    chain = replace(CHAIN, segments=(*logs, base(5_000, 5_005)))

    fitting = chain.within(80_000)
    assert 60_000 < len(fitting.to_json()) <= 80_000
    assert (fitting.logs, fitting.base) == (logs[-len(fitting.logs) :], chain.base)
    assert fitting.deleting == tuple(range(1_000 - len(fitting.logs)))
    assert fitting.within(80_000) is fitting

    assert chain.within(1_000).logs == logs[500:], "the rest is not in the base"
    assert replace(chain, segments=logs).within(1_000).logs == logs


def test_without_a_base_nothing_is_deleted() -> None:
    chain = replace(CHAIN, segments=CHAIN.logs)

    assert chain.retained(9_999_000) == chain


def test_a_new_base_replaces_the_old_one() -> None:
    chain = CHAIN.with_unfinished(7).with_segment(base(7, 30))

    assert chain.base == base(7, 30)
    assert chain.unfinished == ()
    assert chain.deleting == (3,)


def test_every_ledger_of_a_disabled_feed_is_deleted() -> None:
    chain = CHAIN.with_unfinished(7).disabled(now_ms=5, by="somebody")

    assert chain.segments == ()
    assert chain.deleting == (1, 2, 3, 4, 5, 7)
    assert chain.enabled(now_ms=6, by="x", retention_s=5).generation == 2


def test_the_generation_grows_even_if_the_chain_before_is_lost() -> None:
    """Otherwise receipts of the lost feed would count as those of the next one."""
    before = NO_FEED.enabled(now_ms=0, by="x", retention_s=5, generation_min=100)
    again = before.disabled(now_ms=0, by="x").enabled(
        now_ms=0, by="x", retention_s=5, generation_min=100
    )
    after = NO_FEED.enabled(now_ms=0, by="x", retention_s=5, generation_min=102)

    assert before.generation < again.generation < after.generation
