"""Chooses the sources for the entries of a copy."""

from collections import Counter
from collections.abc import Callable

import pytest

from ledgers.bookies import Answer, SourceHealth
from ledgers.model import BookieId
from replication.copying import SOURCE_RUN_ENTRIES, CopyJob, CopyOutcome, Tried, assign
from tests.replication.copies import whole_ledger
from tests.replication.ledger_values import B2, B3, BOOKIES


def nothing_known(bookie: BookieId) -> SourceHealth:
    return SourceHealth()


def asked(
    what: CopyJob, source_health: Callable[[BookieId], SourceHealth] = nothing_known
) -> dict[BookieId, list[int]]:
    reads, _ = assign(what.entry_ids, {}, what, source_health, CopyOutcome())
    return {bookie: list(entry_ids) for bookie, entry_ids in reads.items()}


@pytest.mark.parametrize(
    ("ensemble", "write_quorum"),
    [
        pytest.param(BOOKIES[:3], 3, id="E 3, W 3"),
        pytest.param(BOOKIES[:3], 2, id="E 3, W 2"),
        pytest.param(BOOKIES[:5], 3, id="E 5, W 3"),
        pytest.param(BOOKIES[:4], 3, id="E 4, W 3"),
        pytest.param(BOOKIES[:2], 2, id="E 2, W 2"),
    ],
)
def test_reads_are_spread_over_the_replicas(
    ensemble: tuple[BookieId, ...], write_quorum: int
) -> None:
    for index in range(len(ensemble)):
        what = whole_ledger(ensemble, entry_count=6_000, write_quorum=write_quorum, index=index)

        reads = asked(what)

        # No replica is asked more than if each entry were divided among those that hold it.
        shares: Counter[BookieId] = Counter()
        for entry_id in what.entry_ids:
            sources = [
                b
                for i, b in enumerate(ensemble)
                if i != index and entry_id in what.fragment.entries_of(i)
            ]
            shares.update(dict.fromkeys(sources, 120 // len(sources)))
        most = max(shares.values()) / 120
        assert sorted(e for ids in reads.values() for e in ids) == list(what.entry_ids)
        assert all(ids == sorted(ids) for ids in reads.values())
        assert max(map(len, reads.values())) <= most + SOURCE_RUN_ENTRIES
        for bookie, entry_ids in reads.items():
            assert set(entry_ids) <= set(what.fragment.entries_of(ensemble.index(bookie)))


def test_consecutive_entries_come_from_one_source() -> None:
    """So that batch reads can bring them."""
    reads = asked(whole_ledger(entry_count=4 * SOURCE_RUN_ENTRIES))

    assert {bookie: len(ids) for bookie, ids in reads.items()} == dict.fromkeys(
        BOOKIES[1:3], 2 * SOURCE_RUN_ENTRIES
    )
    assert all(
        ids[:SOURCE_RUN_ENTRIES] == list(range(ids[0], ids[0] + SOURCE_RUN_ENTRIES))
        for ids in reads.values()
    )


def test_small_ledgers_are_read_from_one_source_each() -> None:
    """Together they use all sources."""
    sources: Counter[BookieId] = Counter()
    for ledger_id in range(100):
        sources.update(asked(whole_ledger(entry_count=10, ledger_id=ledger_id)).keys())

    assert sources == dict.fromkeys(BOOKIES[1:3], 50)


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        pytest.param(
            SourceHealth(is_unhealthy=True), SourceHealth(), 0, 0, id="one source failed lately"
        ),
        pytest.param(
            SourceHealth(is_unhealthy=True),
            SourceHealth(waiting_bytes=10**9, reply_s=3.0),
            0,
            0,
            id="one source failed, the other is slow and has much to do",
        ),
        pytest.param(
            SourceHealth(reply_s=0.1), SourceHealth(reply_s=0.01), 300, 600, id="one source is slow"
        ),
        pytest.param(
            SourceHealth(waiting_bytes=10**6),
            SourceHealth(),
            1_000,
            1_700,
            id="one source has much to do",
        ),
        pytest.param(
            SourceHealth(is_unhealthy=True),
            SourceHealth(is_unhealthy=True),
            1_900,
            2_100,
            id="both failed",
        ),
        pytest.param(
            SourceHealth(reply_s=0.0002),
            SourceHealth(reply_s=0.0009),
            1_900,
            2_100,
            id="both are quick",
        ),
    ],
)
def test_sources_are_chosen_by_health_and_load(
    first: SourceHealth, second: SourceHealth, least: int, most: int
) -> None:
    standings = {B2: first, B3: second}

    reads = asked(whole_ledger(entry_count=4_000), standings.__getitem__)

    assert least <= len(reads.get(B2, [])) <= most


def test_a_sole_replica_has_no_short_deadline_but_others_have() -> None:
    alone = whole_ledger(BOOKIES[:2], entry_count=10, write_quorum=2)
    of_two = whole_ledger(entry_count=10)

    for what, have_alternatives in ((alone, False), (of_two, True)):
        found = assign(what.entry_ids, {}, what, nothing_known, CopyOutcome())
        assert found[1] is have_alternatives


def test_unresponsive_replicas_are_asked_again_at_the_end() -> None:
    what, tried, lacking = whole_ledger(entry_count=3), Tried(), CopyOutcome()
    order = []
    entry_ids: list[int] = [0, 1, 2]
    for _ in range(3):
        reads, have_alternatives = assign(entry_ids, tried, what, nothing_known, lacking)
        order += [(bookie, have_alternatives) for bookie in reads]
        failures = {b: dict.fromkeys(ids, Answer.UNKNOWN) for b, ids in reads.items()}
        entry_ids = tried.note(failures)

    last, _ = assign(entry_ids, tried, what, nothing_known, lacking)

    assert order == [(order[0][0], True), (order[1][0], False), (order[0][0], False)]
    assert order[0][0] != order[1][0]
    assert not last
    assert lacking.unknown == (0, 1, 2)
