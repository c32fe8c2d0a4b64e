"""Judging the answers about a range of copies, compared with a count of every entry."""

import random
import tracemalloc
from dataclasses import replace

import pytest

from auditor.fsck.judge import (
    EVIDENCE_MAX,
    EntryRange,
    VerdictBuilder,
    entries_without_copy,
    excused_indexes,
    judge,
)
from auditor.fsck.verdicts import EntryCopies, Evidence, Finding, Grade
from ledgers.bookies import Answer
from ledgers.manager import VersionedMetadata
from ledgers.model import (
    BookieId,
    Fragment,
    LedgerMetadata,
    LedgerState,
    known_fragments,
    write_set,
)
from ledgers.store import Stat
from replication.copy_reader import ReadFailures
from replication.entry_runs import EntryRuns
from tests.replication.ledger_values import B1, B2, B3, B4, B5, closed_ledger, fragment

ENSEMBLE = (B1, B2, B3, B4, B5)
_REFUSALS = (Answer.ABSENT, Answer.MISMATCH, Answer.UNREADABLE, Answer.UNKNOWN)


def stretch(
    frag: Fragment, first: int | None = None, last: int | None = None, **changes: object
) -> EntryRange:
    assert frag.last_entry_id is not None
    return EntryRange(
        fragment=frag,
        first_entry_id=frag.first_entry_id if first is None else first,
        last_entry_id=frag.last_entry_id if last is None else last,
        ack_quorum=2,
        **changes,  # type: ignore[arg-type]
    )


def drawn(rng: random.Random) -> EntryRange:
    """Return random answers of all bookies of a striped fragment.

    The failures reach beyond the range.
    """
    size = rng.randint(3, 5)
    frag = fragment(ENSEMBLE[:size], first=10, last=60, write_quorum=rng.randint(2, size))
    first, last = 20, 20 + rng.randint(0, 25)
    refused = {}
    for index, bookie in enumerate(frag.ensemble):
        own = list(frag.entries_of(index))
        kinds = [rng.choice((None, None, None, *_REFUSALS)) for _ in own]
        refused[bookie] = ReadFailures()
        refused[bookie].add({e: kind for e, kind in zip(own, kinds, strict=True) if kind})
    whole = {b: rng.choice(("absent", "unresponsive", "", "", "", "")) for b in frag.ensemble}
    return stretch(
        frag,
        first,
        last,
        failures={b: r for b, r in refused.items() if not whole[b] and rng.random() < 0.8},
        absent=frozenset(b for b, kind in whole.items() if kind == "absent"),
        unresponsive=frozenset(b for b, kind in whole.items() if kind == "unresponsive"),
        excused=frozenset(i for i in range(size) if rng.random() < 0.3),
    )


def of_entry(seen: EntryRange, entry_id: int) -> EntryCopies:
    """Return the copies of one entry, for comparison."""
    frag = seen.fragment
    bad = excused = on_absent = unanswered = 0
    for index in write_set(
        entry_id, ensemble_size=frag.ensemble_size, write_quorum=frag.write_quorum
    ):
        bookie = frag.ensemble[index]
        refused = seen.failures.get(bookie, ReadFailures())
        if bookie in seen.absent:
            on_absent += 1
        elif bookie in seen.unresponsive or entry_id in refused.unknown:
            unanswered += 1
        elif entry_id in refused.absent and index in seen.excused:
            excused += 1
        elif entry_id in refused:
            bad += 1
    return EntryCopies(
        write_quorum=frag.write_quorum,
        ack_quorum=seen.ack_quorum,
        bad=bad,
        excused=excused,
        on_absent=on_absent,
        unanswered=unanswered,
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_worst_entry_decides_the_grade(seed: int) -> None:
    """The result equals that of judging each entry alone."""
    seen = drawn(random.Random(seed))
    entries = [of_entry(seen, e) for e in range(seen.first_entry_id, seen.last_entry_id + 1)]

    verdict = judge(seen)

    assert verdict.grade is min((e.grade for e in entries), key=lambda grade: grade.rank), seed
    assert verdict.copies_least == min(e.good for e in entries), seed
    assert verdict.rests_on_unknown == any(e.on_absent or e.unanswered for e in entries), seed
    lost = [
        e
        for e, copies in enumerate(entries, seen.first_entry_id)
        if copies.bad + copies.excused == copies.write_quorum
    ]
    assert list(entries_without_copy(seen)) == lost, seed


def test_an_entry_without_any_copy_is_not_legal_even_without_an_ack_quorum() -> None:
    assert not EntryCopies(write_quorum=2, ack_quorum=0, excused=2).is_legal
    assert EntryCopies(write_quorum=2, ack_quorum=0, excused=1).is_legal


def test_evidence_has_bookie_entries_and_answer() -> None:
    refused = ReadFailures(absent=EntryRuns([3, 4, 9]), mismatched=EntryRuns([5]))

    verdict = judge(stretch(fragment(write_quorum=3), failures={B2: refused}))

    assert verdict.evidence == (
        Evidence(
            finding=Finding.MISSING,
            bookie=B2,
            first_entry_id=3,
            last_entry_id=9,
            entry_count=3,
            code="no_such_entry",
        ),
        Evidence(
            finding=Finding.BAD_DIGEST,
            bookie=B2,
            first_entry_id=5,
            last_entry_id=5,
            entry_count=1,
            code="digest_mismatch",
        ),
    )


def test_failures_outside_the_range_do_not_count() -> None:
    refused = ReadFailures(absent=EntryRuns([3]))

    seen = stretch(fragment(write_quorum=3), 4, 9, failures={B2: refused})

    assert judge(seen).grade is Grade.WHOLE


def test_a_copy_elsewhere_counts_only_for_its_entries() -> None:
    refused = dict.fromkeys((B1, B2, B3), ReadFailures(absent=EntryRuns([3, 4])))
    frag = fragment(write_quorum=3)

    role = judge(stretch(frag, failures=refused, elsewhere={B4: EntryRuns([3])}))
    whole = judge(stretch(frag, failures=refused, elsewhere={B4: EntryRuns([3, 4])}))

    assert (role.grade, whole.grade) == (Grade.LOST, Grade.AT_RISK)
    assert (Finding.STRAY, B4, "only_copy") in {
        (e.finding, e.bookie, e.code) for e in whole.evidence
    }


@pytest.mark.parametrize(
    ("lacking", "finding", "grade"),
    [
        ([B3], Finding.ACK_QUORUM_ONLY, Grade.DEGRADED),
        ([B1], Finding.MISSING, Grade.DEGRADED),
        ([B1, B3], Finding.MISSING, Grade.AT_RISK),
    ],
)
def test_only_a_bookie_that_the_writer_replaced_is_excused(
    lacking: list[BookieId], finding: Finding, grade: Grade
) -> None:
    metadata = ledger((B1, B2, B3), (B1, B2, B4))
    first = known_fragments(7, metadata, lac=metadata.last_entry_id)[0]
    seen = stretch(
        first,
        failures={b: ReadFailures(absent=EntryRuns([4])) for b in lacking},
        excused=excused_indexes(metadata, first),
    )

    verdict = judge(seen)

    assert verdict.grade is grade
    assert {each.finding for each in verdict.evidence} == {finding}


@pytest.mark.parametrize(("position", "expected"), [(0, set()), (1, {2})])
def test_a_reformatted_bookie_is_excused_only_after_its_return(
    position: int, expected: set[int]
) -> None:
    """The writer may have chosen it again only for a later fragment."""
    metadata = ledger((B1, B2, B3), (B1, B2, B3), (B1, B2, B4))
    found = known_fragments(7, metadata, lac=metadata.last_entry_id)[position]

    assert excused_indexes(metadata, found, reformatted={B3}) == expected


@pytest.mark.parametrize("how", [Answer.MISMATCH, Answer.UNREADABLE])
def test_damage_is_never_excused(how: Answer) -> None:
    metadata = ledger((B1, B2, B3), (B1, B2, B4))
    first = known_fragments(7, metadata, lac=metadata.last_entry_id)[0]
    refused = ReadFailures()
    refused.add({4: how})

    verdict = judge(
        stretch(first, failures={B3: refused}, excused=excused_indexes(metadata, first))
    )

    assert Finding.ACK_QUORUM_ONLY not in {each.finding for each in verdict.evidence}


def ledger(*ensembles: tuple[BookieId, ...], **changes: object) -> LedgerMetadata:
    starts = tuple(range(0, 5 * len(ensembles), 5))
    found = closed_ledger(
        *ensembles, write_quorum=3, starts=starts, last_entry_id=5 * len(ensembles) - 1
    )
    return replace(found, **({"ack_quorum": 2} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "position", "expected"),
    [
        pytest.param(ledger((B1, B2, B3)), 0, set(), id="the last of a closed ledger"),
        pytest.param(ledger((B1, B2, B3), (B1, B2, B4)), 0, {2}, id="replaced next"),
        pytest.param(ledger((B1, B2, B3), (B1, B2, B4)), 1, set(), id="last"),
        pytest.param(
            ledger((B1, B2, B3), (B1, B2, B4), (B1, B5, B4)), 0, {1, 2}, id="replaced later"
        ),
        pytest.param(
            ledger((B1, B2, B3), (B1, B2, B4), (B1, B2, B3)), 0, {2}, id="replaced and back"
        ),
        pytest.param(
            ledger((B1, B2, B3), (B1, B2, B4), ack_quorum=3), 0, set(), id="all must acknowledge"
        ),
        pytest.param(
            ledger((B1, B2, B3), (B1, B2, B4), state=LedgerState.OPEN, last_entry_id=-1, length=0),
            1,
            {0, 1, 2},
            id="still written",
        ),
    ],
)
def test_the_bookies_that_may_lack_copies(
    metadata: LedgerMetadata, position: int, expected: set[int]
) -> None:
    found = known_fragments(7, metadata, lac=8)[position]

    assert excused_indexes(metadata, found) == expected


def test_ten_million_entries_are_judged_in_little_memory() -> None:
    frag = fragment(last=10_000_000 - 1)
    tracemalloc.start()
    try:
        verdict = judge(stretch(frag, absent=frozenset([B2])))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert verdict.grade is Grade.AT_RISK
    assert verdict.evidence[0].entry_count == pytest.approx(6_666_667, abs=1)
    assert peak_bytes < 1_000_000


def test_evidence_is_bounded_and_the_rest_is_counted() -> None:
    metadata = ledger(*[(B1, B2, B3)] * 80)
    builder = VerdictBuilder(
        VersionedMetadata(ledger_id=7, metadata=metadata, stat=Stat(version=3), data=b"")
    )
    found = known_fragments(7, metadata, lac=metadata.last_entry_id)
    for position, frag in enumerate(found):
        builder.add_fragment(position, frag)
        builder.add_range(position, judge(stretch(frag, absent=frozenset([B1, B2]))))

    verdict = builder.verdict(checked_ms=5)

    assert (len(verdict.evidence), verdict.evidence_left_out) == (EVIDENCE_MAX, 60)
    assert len(verdict.fragments) == 80
    assert (verdict.grade, verdict.findings) == (Grade.AT_RISK, (Finding.BOOKIE_GONE,))
    assert (verdict.metadata_version, verdict.checked_ms) == (3, 5)


def test_ranges_of_a_fragment_add_up() -> None:
    frag = fragment(last=19, write_quorum=3)
    metadata = ledger((B1, B2, B3), last_entry_id=19)
    builder = VerdictBuilder(
        VersionedMetadata(ledger_id=7, metadata=metadata, stat=Stat(version=0), data=b"")
    )
    builder.add_fragment(0, frag)
    for first, refused in ((0, {B1: [2, 3]}), (10, {B1: [11, 15], B2: [11]})):
        runs = {bookie: ReadFailures(absent=EntryRuns(ids)) for bookie, ids in refused.items()}
        builder.add_range(0, judge(stretch(frag, first, first + 9, failures=runs)))

    verdict = builder.verdict(checked_ms=0)

    assert verdict.grade is verdict.fragments[0].grade is Grade.AT_RISK
    assert verdict.fragments[0].copies_least == 1
    assert [
        (e.bookie, e.first_entry_id, e.last_entry_id, e.entry_count) for e in verdict.evidence
    ] == [(B1, 2, 15, 4), (B2, 11, 11, 1)]


@pytest.mark.parametrize(
    ("lacking", "unresponsive", "expected"),
    [
        pytest.param(B3, frozenset(), Grade.DEGRADED, id="excused only"),
        pytest.param(B3, frozenset({B4}), Grade.UNKNOWN, id="excused, and unanswered"),
        pytest.param(B1, frozenset({B4}), Grade.DEGRADED, id="damaged, and unanswered"),
    ],
)
def test_an_excused_fragment_hides_no_unanswered_one(
    lacking: BookieId, unresponsive: frozenset[BookieId], expected: Grade
) -> None:
    metadata = ledger((B1, B2, B3), (B1, B2, B4))
    first, last = known_fragments(7, metadata, lac=metadata.last_entry_id)
    builder = VerdictBuilder(
        VersionedMetadata(ledger_id=7, metadata=metadata, stat=Stat(version=0), data=b"")
    )
    for position, frag in enumerate((first, last)):
        builder.add_fragment(position, frag)
        seen = stretch(
            frag,
            failures={lacking: ReadFailures(absent=EntryRuns([2]))},
            unresponsive=unresponsive,
            excused=excused_indexes(metadata, frag),
        )
        builder.add_range(position, judge(seen))

    assert builder.verdict(checked_ms=0).grade is expected
