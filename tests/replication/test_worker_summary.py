"""The summary of repairs in a worker's log, and how often it is logged."""

from msgspec.structs import replace
from structlog.testing import capture_logs

from replication.history import Cause, CausedBy
from replication.reasons import Blocked, Facts, Reason
from replication.repair import DONE, waiting
from replication.worker import Summary
from tests.memory.history import MemoryHistory
from tests.replication.ledger_values import B1, B2, B3
from tests.virtual_time import LoopClock

LOST, DRAINED = Cause.LOST, Cause.DRAINED
IN_VAIN = waiting(Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("all are short of room",))))


def test_the_summary_is_logged_as_soon_as_no_ledger_is_left() -> None:
    summary = Summary()
    summary.add(DONE)
    summary.add(IN_VAIN)

    with capture_logs() as lines:
        summary.tell_if_done()
        summary.tell_if_done()

    assert [(line["ledger_count"], line["deferred_count"]) for line in lines] == [(1, 1)]


async def test_the_history_gets_the_counts_of_repairs_alone() -> None:
    history = MemoryHistory(LoopClock())
    summary = Summary(history)
    for outcome in (DONE, IN_VAIN, replace(DONE, entry_count=7, entry_bytes=70)):
        summary.add(outcome)

    summary.tell(at_work_count=0)
    summary.add(IN_VAIN)
    summary.tell(at_work_count=0)

    (event,) = history.events
    assert (event.ledger_count, event.entry_count, event.entry_bytes) == (2, 7, 70)


async def test_repairs_of_a_loss_and_of_a_drain_are_told_apart() -> None:
    history = MemoryHistory(LoopClock())
    summary = Summary(history)
    for cause, bookie in ((LOST, B1), (DRAINED, B3), (LOST, B2)):
        summary.add(replace(DONE, entry_count=2, caused_by=CausedBy(cause, (bookie,))))

    summary.tell(at_work_count=0)

    assert [(e.cause, e.bookies, e.ledger_count, e.entry_count) for e in history.events] == [
        (LOST, (B1, B2), 2, 4),
        (DRAINED, (B3,), 1, 2),
    ]


def test_repeated_deferrals_do_not_fill_the_log() -> None:
    summary = Summary()

    with capture_logs() as lines:
        for _ in range(100):
            summary.add(IN_VAIN)
            summary.tell_if_done()
        assert lines == []

        summary.tell(at_work_count=0)  # the interval is over
    assert [line["deferred_count"] for line in lines] == [100]


def test_an_empty_summary_is_not_logged() -> None:
    with capture_logs() as lines:
        Summary().tell(at_work_count=3)

    assert lines == []
