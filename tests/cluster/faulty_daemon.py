"""``python -m tests.cluster.faulty_daemon POINT SIGNAL``: a daemon that stops at a named point.

The daemon is the real one, with its queue and its bulk path wrapped. The first time that a repair
reaches the point, the process sends itself the signal. SIGKILL ends it; SIGSTOP freezes it until it
gets SIGCONT.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from enum import Enum

from msgspec.structs import replace

from daemon.cli.main import main
from ledgers.bookies import Transfer, TransferResult
from ledgers.bulk.engine import BulkTransfers
from ledgers.model import BookieId
from ledgers.store import Check, Operation, OperationResult
from replication.work_queue import LedgerLease, OnApplied, Queue, QueuedLedger


class Point(Enum):
    """The steps of a repair between which it may be interrupted."""

    BEFORE_LOCK = "before-lock"
    AFTER_LOCK = "after-lock"
    MID_COPY = "mid-copy"
    BEFORE_COMPARE_AND_SET = "before-compare-and-set"
    AFTER_COMPARE_AND_SET = "after-compare-and-set"
    BEFORE_UNMARK = "before-unmark"


STOP_S = 0.3
"""Another thread may receive the signal, and a busy machine may take a while to stop this one."""


class Striker:
    """Sends the signal at the point, once."""

    def __init__(self, point: Point, number: signal.Signals) -> None:
        self._point, self._number = point, number
        self._is_done = False

    def reach(self, point: Point) -> bool:
        """Send the signal if this is the point. Return True if the process survived the signal."""
        if point is not self._point or self._is_done:
            return False
        self._is_done = True
        # Not ``sys.stderr``, which writes on a thread: the signal may come first.
        os.write(2, f'{{"event": "struck", "point": "{point.value}"}}\n'.encode())
        os.kill(os.getpid(), self._number)
        time.sleep(STOP_S)
        return True

    def aims_at(self, point: Point) -> bool:
        return point is self._point and not self._is_done


def install(striker: Striker) -> None:
    """Wrap the steps that ``Point`` names. Everything else stays as it is."""
    lease, finish, write = Queue.lease, Queue.complete, Queue.write
    transfer = BulkTransfers.transfer

    async def lease_with_signals(self: Queue, queued: QueuedLedger) -> LedgerLease | None:
        striker.reach(Point.BEFORE_LOCK)
        leased = await lease(self, queued)
        if leased is not None:
            striker.reach(Point.AFTER_LOCK)
        return leased

    async def complete_with_signals(
        self: Queue, leased: LedgerLease, extra: Sequence[Operation] = (), **options: OnApplied
    ) -> bool:
        is_writing = not all(isinstance(each, Check) for each in extra)
        striker.reach(Point.BEFORE_COMPARE_AND_SET if is_writing else Point.BEFORE_UNMARK)
        result = await finish(self, leased, extra, **options)
        if is_writing:
            striker.reach(Point.AFTER_COMPARE_AND_SET)
        return result

    async def write_with_signals(
        self: Queue, leased: LedgerLease, operations: Sequence[Operation]
    ) -> list[OperationResult]:
        striker.reach(Point.BEFORE_COMPARE_AND_SET)
        results = await write(self, leased, operations)
        striker.reach(Point.AFTER_COMPARE_AND_SET)
        return results

    async def transfer_with_signals(self: BulkTransfers, asked: Transfer) -> TransferResult:
        if asked.target is not None and striker.aims_at(Point.MID_COPY):
            await transfer(self, replace(asked, reads=_first_half(asked)))
            striker.reach(Point.MID_COPY)
        return await transfer(self, asked)

    for owner, name, struck in (
        (Queue, "lease", lease_with_signals),
        (Queue, "complete", complete_with_signals),
        (Queue, "write", write_with_signals),
        (BulkTransfers, "transfer", transfer_with_signals),
    ):
        setattr(owner, name, struck)


def _first_half(asked: Transfer) -> dict[BookieId, Sequence[int]]:
    return {bookie: ids[: (len(ids) + 1) // 2] for bookie, ids in asked.reads.items()}


if __name__ == "__main__":
    install(Striker(Point(sys.argv[1]), signal.Signals[sys.argv[2]]))
    sys.argv = ["bookmender", "daemon"]
    main()
