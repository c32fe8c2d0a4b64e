"""Reading a ledger's copies until each answer is certain."""

from collections.abc import Awaitable, Callable

import pytest

from auditor.fsck.ledger_inspector import sampled
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.errors import (
    BookmenderError,
    BusyError,
    LocalLimitError,
    NoAnswerError,
    UnreadableError,
)
from ledgers.model import BookieId
from replication.copy_reader import UNANSWERED_MAX, CopyReader, ReadFailures
from replication.entry_runs import EntryRuns
from tests.fsck.inspections import inspect_once, one_ledger, options, replace_payload, told
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import DIGEST, ENTRY_BYTES, Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B4
from tests.replication.nodes import LEDGER

Errors = list[type[BookmenderError] | None]


def fail_in_turn(cluster: Cluster, bookie: BookieId, errors: Errors) -> None:
    """Make the reads of the bookie fail with these errors in turn, and then succeed."""
    left = iter(errors)

    def faults(asked: BookieId, op: Op, ledger_id: int) -> Fault:
        return Fault(error=next(left, None) if (asked, op) == (bookie, Op.READ) else None)

    cluster.bookies.faults = faults


def reads_of(cluster: Cluster) -> CopyReader:
    return CopyReader(
        LEDGER,
        bookies=cluster.bookies,
        digest=DIGEST,
        entry_bytes=ENTRY_BYTES,
        retry_clock=cluster.clock,
    )


def without_retries(cluster: Cluster) -> CopyReader:
    return CopyReader(LEDGER, bookies=cluster.bookies, digest=DIGEST, entry_bytes=ENTRY_BYTES)


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
async def test_a_read_error_counts_the_second_time(errors: Errors, expected: str | None) -> None:
    cluster, _ = await one_ledger()
    fail_in_turn(cluster, B1, errors)

    answers = await reads_of(cluster).read({B1: ([3, 4],)})

    if expected is None:
        assert not answers.failures
    else:
        assert answers.failures == {B1: ReadFailures(**{expected: EntryRuns([3])})}


@in_virtual_time
async def test_an_unresponsive_bookie_is_asked_no_more() -> None:
    cluster, _ = await one_ledger()
    fail_in_turn(cluster, B1, [None, NoAnswerError])
    reads = reads_of(cluster)

    first = await reads.read({B1: ([3, 4],), B2: ([3],)})
    second = await reads.read({B1: ([5],), B2: ([5],)})

    assert first.failures == {B1: ReadFailures(unknown=EntryRuns([4]))}
    assert not second.failures
    assert reads.unresponsive == {B1}
    assert cluster.bookies.asked(B1) == [3, 4]


@pytest.mark.parametrize("is_retried", [True, False])
@in_virtual_time
async def test_a_bookie_is_not_called_unresponsive_while_this_process_lacks_a_file(
    is_retried: bool,
) -> None:
    cluster, _ = await one_ledger(last=UNANSWERED_MAX)
    cluster.bookies.fail(B1, Op.READ, Fault(error=LocalLimitError))
    reads = reads_of(cluster) if is_retried else without_retries(cluster)

    first = await reads.read({B1: (range(UNANSWERED_MAX),)})
    cluster.bookies.stop_failing(B1, Op.READ)
    second = await reads.read({B1: ([5],)})

    assert first.failures == {B1: ReadFailures(unknown=EntryRuns(range(UNANSWERED_MAX)))}
    assert not second.failures
    assert reads.unresponsive == set()


@in_virtual_time
async def test_a_bookie_is_asked_again_when_this_process_has_a_file() -> None:
    cluster, _ = await one_ledger()
    fail_in_turn(cluster, B1, [LocalLimitError])

    reads = reads_of(cluster)

    answers = await reads.read({B1: ([3],)})

    assert not answers.failures
    assert reads.entry_count == 1


@in_virtual_time
async def test_runs_beyond_one_transfer_are_read_in_order() -> None:
    cluster, _ = await one_ledger(last=9)
    for entry_id in (2, 7):
        cluster.bookie(B1).lose(LEDGER, entry_id)

    answers = await reads_of(cluster).read({B1: ([0], range(2, 9)), B2: ([9],)})

    assert answers.failures == {B1: ReadFailures(absent=EntryRuns([2, 7]))}


@in_virtual_time
async def test_copies_read_at_a_second_try_are_compared_too() -> None:
    cluster, _ = await one_ledger()
    replace_payload(cluster, B1, 0)
    fail_in_turn(cluster, B1, [BusyError])

    assert told(await inspect_once(cluster)) == (Grade.WHOLE, (Finding.SUSPECT,))


def entry_of_sample(last: int) -> int:
    """Return an entry of the run's sample that is not at an end."""
    wanted = options(Level.SAMPLE)
    found = sampled(0, last, share=wanted.sample_share, seed=wanted.seed ^ LEDGER)
    return next(entry_id for entry_id in found if 5 < entry_id < last - 5)


@in_virtual_time
async def test_a_gap_in_the_sample_leads_to_the_other_gaps() -> None:
    cluster, _ = await one_ledger(last=99)
    drawn = entry_of_sample(99)
    for entry_id in (drawn, drawn + 1, drawn + 2):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    verdict = await inspect_once(cluster, Level.SAMPLE)

    assert told(verdict) == (Grade.DEGRADED, (Finding.MISSING,))
    assert [each.entry_count for each in verdict.evidence] == [3]


@in_virtual_time
async def test_unanswered_reads_of_a_sample_make_it_unknown() -> None:
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
async def test_a_loss_is_doubtful_if_a_former_member_does_not_answer(
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
