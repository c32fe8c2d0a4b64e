"""What a worker's log says of all its ledgers together, and how often."""

from structlog.testing import capture_logs

from replication.outcome import DONE, waiting
from replication.reasons import Blocked, Facts, Reason
from replication.worker import Summary

IN_VAIN = waiting(Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("all are short of room",))))


def test_when_nothing_is_at_hand_any_more_what_was_repaired_is_told_at_once() -> None:
    summary = Summary()
    summary.add(DONE)
    summary.add(IN_VAIN)

    with capture_logs() as lines:
        summary.tell_if_done()
        summary.tell_if_done()

    assert [(line["ledger_count"], line["deferred_count"]) for line in lines] == [(1, 1)]


def test_ledgers_that_are_tried_in_vain_again_and_again_fill_no_log() -> None:
    summary = Summary()

    with capture_logs() as lines:
        for _ in range(100):
            summary.add(IN_VAIN)
            summary.tell_if_done()
        assert lines == []

        summary.tell(at_work_count=0)  # the interval is over
    assert [line["deferred_count"] for line in lines] == [100]


def test_nothing_is_told_of_nothing() -> None:
    with capture_logs() as lines:
        Summary().tell(at_work_count=3)

    assert lines == []
