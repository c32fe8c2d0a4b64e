"""A ledger's entries asked for until each answer can be built on: errors, silences, and what comes
late."""

from collections.abc import Awaitable, Callable

import pytest

from auditor.fsck.copy_inspection import sampled
from auditor.fsck.copy_reader import CopyReader
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.errors import BookmenderError, BusyError, NoAnswerError, UnreadableError
from ledgers.memory.bookies import Fault, Op
from ledgers.model import BookieId
from replication.copy_checks import ReadFailures
from replication.entry_runs import EntryRuns
from tests.fsck.inspections import inspect_once, one_ledger, options, replace_payload, told
from tests.replication.cluster import DIGEST, ENTRY_BYTES, Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B4
from tests.replication.nodes import LEDGER

Errors = list[type[BookmenderError] | None]


def fail_in_turn(cluster: Cluster, bookie: BookieId, errors: Errors) -> None:
    """The errors of its reads, one after the other; then there is none."""
    left = iter(errors)

    def faults(asked: BookieId, op: Op, ledger_id: int) -> Fault:
        return Fault(error=next(left, None) if (asked, op) == (bookie, Op.READ) else None)

    cluster.bookies.faults = faults


def reads_of(cluster: Cluster) -> CopyReader:
    return CopyReader(
        LEDGER,
        bookies=cluster.bookies,
        clock=cluster.clock,
        digest=DIGEST,
        entry_bytes=ENTRY_BYTES,
    )


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        # The first of two entries fails; the second is good.
        ([UnreadableError, None, UnreadableError], "unreadable"),
        ([UnreadableError, None, BusyError, UnreadableError], "unreadable"),
        ([BusyError, None, UnreadableError, UnreadableError], "unreadable"),
        ([UnreadableError, None, BusyError, BusyError, BusyError], "unknown"),
        ([BusyError, None, BusyError, BusyError, UnreadableError], "unknown"),
        ([BusyError, None, BusyError, BusyError, BusyError], "unknown"),
        ([UnreadableError, None, None], None),
        ([BusyError, None, BusyError, None], None),
    ],
)
@in_virtual_time
async def test_a_read_error_counts_when_it_came_twice(errors: Errors, expected: str | None) -> None:
    cluster, _ = await one_ledger()
    fail_in_turn(cluster, B1, errors)

    answers = await reads_of(cluster).read({B1: [3, 4]})

    if expected is None:
        assert not answers.failures
    else:
        assert answers.failures == {B1: ReadFailures(**{expected: EntryRuns([3])})}  # type: ignore[arg-type]


@in_virtual_time
async def test_a_bookie_that_falls_silent_is_asked_no_more() -> None:
    cluster, _ = await one_ledger()
    fail_in_turn(cluster, B1, [None, NoAnswerError])
    reads = reads_of(cluster)

    first = await reads.read({B1: [3, 4], B2: [3]})
    second = await reads.read({B1: [5], B2: [5]})

    assert first.failures == {B1: ReadFailures(unknown=EntryRuns([4]))}
    assert not second.failures
    assert reads.unresponsive == {B1}
    assert cluster.bookies.asked(B1) == [3, 4]


@in_virtual_time
async def test_more_runs_than_one_transfer_holds_are_asked_for_in_order() -> None:
    cluster, _ = await one_ledger(last=9)
    for entry_id in (2, 7):
        cluster.bookie(B1).lose(LEDGER, entry_id)

    answers = await reads_of(cluster).read_runs({B1: ([0], range(2, 9)), B2: ([9],)})

    assert answers.failures == {B1: ReadFailures(absent=EntryRuns([2, 7]))}


@in_virtual_time
async def test_what_is_read_at_a_second_try_is_compared_too() -> None:
    cluster, _ = await one_ledger()
    replace_payload(cluster, B1, 0)
    fail_in_turn(cluster, B1, [BusyError])

    assert told(await inspect_once(cluster)) == (Grade.WHOLE, (Finding.SUSPECT,))


def entry_of_sample(last: int) -> int:
    """One that the run's sample holds, and that is no end."""
    wanted = options(Level.SAMPLE)
    found = sampled(0, last, share=wanted.sample_share, seed=wanted.seed ^ LEDGER)
    return next(entry_id for entry_id in found if 5 < entry_id < last - 5)


@in_virtual_time
async def test_a_sample_sees_what_is_missing_of_it_and_then_what_else_is() -> None:
    cluster, _ = await one_ledger(last=99)
    drawn = entry_of_sample(99)
    for entry_id in (drawn, drawn + 1, drawn + 2):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    verdict = await inspect_once(cluster, Level.SAMPLE)

    assert told(verdict) == (Grade.DEGRADED, (Finding.MISSING,))
    assert [each.entry_count for each in verdict.evidence] == [3]


@in_virtual_time
async def test_what_a_sample_was_not_answered_for_is_unknown() -> None:
    cluster, _ = await one_ledger(last=99)
    fail_in_turn(cluster, B2, [None, None, None, NoAnswerError])

    verdict = await inspect_once(cluster, Level.SAMPLE)

    assert told(verdict) == (Grade.UNKNOWN, (Finding.NOT_ANSWERED,))
    assert [each.entry_count for each in verdict.evidence] == [1]


async def hang(cluster: Cluster, bookie: BookieId) -> None:
    cluster.bookies.fail(bookie, Op.READ, Fault(error=NoAnswerError))


async def kill(cluster: Cluster, bookie: BookieId) -> None:
    await cluster.kill(bookie)


@pytest.mark.parametrize("silence", [hang, kill])
@in_virtual_time
async def test_a_loss_rests_on_the_silence_of_a_former_member(
    silence: Callable[[Cluster, BookieId], Awaitable[None]],
) -> None:
    cluster, _ = await one_ledger((B1, B2), (B1, B4), starts=(0, 5), last=9, write_quorum=2)
    for bookie in (B1, B2):
        cluster.bookie(bookie).lose(LEDGER, 2)

    certain = await inspect_once(cluster)
    await silence(cluster, B4)
    doubtful = await inspect_once(cluster)

    assert (certain.grade, certain.rests_on_unknown) == (Grade.LOST, False)
    assert doubtful.fragments[0].grade is Grade.LOST
    assert doubtful.fragments[0].rests_on_unknown
