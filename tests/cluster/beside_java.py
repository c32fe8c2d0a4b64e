"""Helpers for tests with Java beside our daemons: its AutoRecovery, and its client as a judge."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from tests.cluster.our_client import sha256_of
from tests.java.messages import Expected, Verdict
from tests.java.tool import JavaTool
from tests.workload import Written

QUICK = {
    "zkTimeout": "2000",
    "rwRereplicateBackoffMs": "200",
    "lockReleaseOfFailedLedgerGracePeriod": "3200",
}


@asynccontextmanager
async def javas(cluster: LocalCluster) -> AsyncIterator[Callable[..., Child]]:
    """Yield a function that starts Java's AutoRecovery daemons, and kill them at the end.

    The daemons are not asked to stop, because one that is may hang for long.
    """
    started: list[Child] = []

    def start(**settings: str) -> Child:
        name = f"java-{time.monotonic_ns()}"
        started.append(cluster.start_autorecovery(name, settings=QUICK | settings))
        return started[-1]

    try:
        yield start
    finally:
        for daemon in started:
            daemon.kill()


def assert_whole(java: JavaTool, uri: str, written: Sequence[Written]) -> None:
    """Assert that every named copy exists, and that Java reads all acknowledged entries."""
    expected = [
        Expected(
            ledger=ledger.ledger_id,
            last=ledger.acknowledged - 1,
            sha256=sha256_of(map(ledger.shape.payload, range(ledger.acknowledged))),
        )
        for ledger in written
    ]
    report = java.judge(uri, [each.ledger for each in expected], expected=expected)
    assert report.verdict is Verdict.WHOLE, report
