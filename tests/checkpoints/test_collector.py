"""Which changes a checkpoint covers."""

import pytest

from checkpoints.collector import LATE_MAX, ChangeCollector, fingerprint_of
from checkpoints.model import Span, ledger_id_of
from ledgers.store import UNTOLD, Stat

DATA = b"metadata"
PRINT = fingerprint_of(DATA)


def read(collector: ChangeCollector, ledger_id: int, *, before: int, now: int) -> None:
    collector.ledger_read(ledger_id, before=before, stat=Stat(version=0, mzxid=now), data=DATA)


def rows(spans: list[Span]) -> list[tuple[int | None, int, int, bool]]:
    return [(ledger_id_of(s.key), s.begin, s.end, s.is_deleted) for s in spans]


def sealed(collector: ChangeCollector) -> list[Span]:
    collector.seal()
    return list(collector.spans(collector.sealed_runs()))


def test_versions_between_two_checkpoints_are_left_out() -> None:
    collector = ChangeCollector(10)
    read(collector, 1, before=0, now=11)
    read(collector, 1, before=11, now=12)
    collector.ledger_removed(2, before=5, zxid=13)

    assert collector.cut() == 13
    assert rows(sealed(collector)) == [(1, 0, 12, False), (2, 5, 13, True)]


def test_a_version_after_the_target_waits_for_the_next_checkpoint() -> None:
    collector = ChangeCollector(10)
    read(collector, 1, before=0, now=12)
    collector.cut()
    read(collector, 2, before=0, now=11)
    read(collector, 1, before=12, now=14)

    assert rows(sealed(collector)) == [(2, 0, 11, False), (1, 0, 12, False)]
    collector.acknowledge(12)
    collector.cut()
    assert rows(sealed(collector)) == [(1, 12, 14, False)]


def test_a_change_that_was_not_committed_is_published_again() -> None:
    collector = ChangeCollector(10)
    read(collector, 1, before=0, now=11)
    read(collector, 2, before=0, now=12)
    collector.cut()
    collector.seal()
    collector.acknowledge(11)

    assert rows(sealed(collector)) == [(2, 0, 12, False)]


def test_a_late_change_gets_the_version_of_the_target() -> None:
    """Its mzxid no longer tells what was published, so the collector remembers it."""
    collector = ChangeCollector(10)
    read(collector, 1, before=0, now=5)
    assert collector.is_late

    assert collector.cut(target_least=20) == 20
    assert rows(sealed(collector)) == [(1, 0, 20, False)]
    collector.acknowledge(20)
    assert collector.published_version(1, 5) == 20
    read(collector, 1, before=5, now=30)
    collector.cut()
    assert rows(sealed(collector)) == [(1, 20, 30, False)]


def test_a_change_after_a_late_one_begins_where_that_one_ends() -> None:
    collector = ChangeCollector(10)
    read(collector, 1, before=0, now=5)
    collector.cut(target_least=20)
    read(collector, 1, before=5, now=25)
    collector.seal()
    collector.acknowledge(20)

    collector.cut()

    assert rows(sealed(collector)) == [(1, 20, 25, False)]


def test_a_deletion_waits_for_its_version() -> None:
    collector = ChangeCollector(10)
    collector.ledger_removed(1, before=7, zxid=UNTOLD)
    assert not collector.has_open
    assert collector.undated() == [1]

    collector.date(1, 15)

    collector.cut()
    assert rows(sealed(collector)) == [(1, 7, 15, True)]


def test_a_ledger_that_exists_again_is_a_change() -> None:
    collector = ChangeCollector(10)
    collector.ledger_removed(1, before=7, zxid=UNTOLD)
    read(collector, 1, before=0, now=16)
    collector.date(1, 15)

    collector.cut()

    assert rows(sealed(collector)) == [(1, 7, 16, False)]


def test_comparison_finds_what_differs_from_the_log() -> None:
    collector = ChangeCollector(10)
    read(collector, 4, before=9, now=12)  # observed before its range was compared

    unread = collector.compare({1: 5, 2: 6, 3: 7, 4: 8}, {1: 5, 2: 11, 4: 12, 5: 13})

    assert sorted(unread) == [2, 5]
    assert collector.undated() == [3]
    collector.date(3, 14)
    collector.cut()
    assert rows(sealed(collector)) == [
        (2, 6, 11, False),
        (4, 8, 12, False),
        (5, 0, 13, False),
        (3, 7, 14, True),
    ]


def test_a_base_has_published_versions_and_pending_deletions() -> None:
    collector = ChangeCollector(10)
    read(collector, 1, before=5, now=11)
    read(collector, 2, before=0, now=12)
    collector.ledger_removed(3, before=7, zxid=13)
    collector.ledger_removed(4, before=8, zxid=UNTOLD)

    collector.begin_base()

    assert collector.published_between({1: 11, 2: 12}, 0, 5) == {1: 5, 3: 7, 4: 8}
    collector.ledger_removed(5, before=9, zxid=14)
    assert collector.published_between({}, 5, None) == {5: 9}


def test_too_many_open_changes_are_forgotten_but_not_those_being_closed() -> None:
    collector = ChangeCollector(10, open_max=2)
    read(collector, 1, before=0, now=11)
    collector.end_comparison()
    read(collector, 2, before=0, now=12)
    collector.cut()

    for ledger_id in (3, 4, 5):
        read(collector, ledger_id, before=0, now=20)
    read(collector, 1, before=11, now=12)
    read(collector, 6, before=0, now=11)

    assert collector.is_overfull
    assert not collector.has_open
    assert rows(sealed(collector)) == [(6, 0, 11, False), (1, 0, 12, False), (2, 0, 12, False)]


def test_what_the_comparison_found_does_not_count_as_too_much() -> None:
    collector = ChangeCollector(10, open_max=2)

    collector.compare({}, dict.fromkeys(range(100), 11))
    collector.end_comparison()
    read(collector, 200, before=0, now=12)

    assert not collector.is_overfull
    assert len(collector) == 101


def test_late_changes_are_split_over_several_targets() -> None:
    collector = ChangeCollector(10)
    for ledger_id in range(2 * LATE_MAX + 1):
        read(collector, ledger_id, before=0, now=5)
    read(collector, 100_000, before=0, now=12)
    counts = []
    zxid = 20

    while collector.has_open:
        zxid += 1
        target = collector.cut(target_least=zxid if collector.is_late else 0)
        spans = sealed(collector)
        assert all(span.end == target for span in spans)
        counts.append(len(spans))
        collector.acknowledge(target)

    assert counts == [LATE_MAX + 1, LATE_MAX, 1]
    assert collector.published_version(2 * LATE_MAX, 5) == zxid


def test_late_changes_that_come_while_others_are_closed_wait() -> None:
    collector = ChangeCollector(10)
    read(collector, 1, before=0, now=12)
    collector.cut()
    read(collector, 2, before=0, now=5)

    assert rows(sealed(collector)) == [(1, 0, 12, False)]
    collector.acknowledge(12)
    assert collector.is_late
    collector.cut(target_least=20)
    assert rows(sealed(collector)) == [(2, 0, 20, False)]


def test_a_ledger_that_vanishes_before_its_comparison_was_never_published() -> None:
    collector = ChangeCollector(10)
    collector.ledger_removed(1, before=11, zxid=12)
    collector.ledger_removed(2, before=11, zxid=UNTOLD)
    collector.ledger_removed(9, before=7, zxid=13)

    collector.compare({}, {}, stop=5)
    collector.compare({9: 7}, {}, first=5)
    collector.date(2, 14)
    collector.cut()

    assert rows(sealed(collector)) == [(1, 0, 12, True), (9, 7, 13, True), (2, 0, 14, True)]


def test_the_deletion_of_a_ledger_that_acls_hide_is_published() -> None:
    collector = ChangeCollector(10)

    assert collector.compare({1: 5}, {1: 0, 2: 0}) == []

    assert collector.published_between({1: 0, 2: 0}, 0, None) == {1: 5}
    collector.ledger_removed(1, before=0, zxid=UNTOLD)
    collector.date(1, 12)
    collector.cut()
    assert rows(sealed(collector)) == [(1, 5, 12, True)]


def test_many_changes_are_sorted_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.collector.SORTED_AT_ONCE", 3)
    collector = ChangeCollector(10)
    for ledger_id, version in ((1, 17), (2, 12), (3, 19), (4, 11), (5, 18), (6, 13), (7, 15)):
        read(collector, ledger_id, before=0, now=version)
    collector.cut()
    collector.seal()
    runs = list(collector.sealed_runs())

    assert [len(run) for run in runs] == [3, 3, 1]
    spans = collector.spans(runs)
    assert [next(spans).end for _ in range(3)] == [11, 12, 13]
    collector.acknowledge(13, [4, 2, 6])
    assert [span.end for span in spans] == [15, 17, 18, 19]
