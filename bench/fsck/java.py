"""Java's auditor checks every entry of every copy of all ledgers, repeatedly in one run of its
daemon.

Its check reads entries and verifies no digest. Its log says how long a check took. The CPU is that
of its daemon between the ends of two checks, with nothing subtracted, because the daemon is
otherwise idle.
"""

import re
import time
from collections.abc import Iterator

from bench.fsck.reading import ServersCpu
from bench.fsck.records import Pass
from bench.inspect_bench import Load
from bench.usage import Cpu, cpu_of
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.errors import UnavailableError

JAVA = "Java"
SETTINGS = {
    "auditorPeriodicCheckInterval": "1",
    "auditorLedgerVerificationPercentage": "100",
    "auditorPeriodicBookieCheckInterval": "0",
    "inFlightReadEntryNumInLedgerChecker": "1000",
}
"""All entries; the next check starts when the last one is over."""
COPIES_OF_ENTRY = 3
CHECK_TIMEOUT_S = 120.0
POLL_S = 0.02
_DONE = re.compile(r"Completed checkAllLedgers \{durationMs=(\d+)\}")


def check_all_ledgers(cluster: LocalCluster, load: Load, *, repeats: int) -> Iterator[Pass]:
    """Yield one pass per check. ``load``: all ledgers of the cluster.

    The first check does not count, because its code is still being compiled. Raises
    UnavailableError.
    """
    child = cluster.start_autorecovery("java", settings=SETTINGS)
    try:
        _, cpu, servers = _next_check(cluster, child, 1)
        for repeat in range(1, repeats + 1):
            elapsed_s, cpu_then, servers_then = _next_check(cluster, child, repeat + 1)
            copies = COPIES_OF_ENTRY * load.ledger_count * load.entry_count
            yield Pass(
                load=load.name,
                contender=JAVA,
                level="full",
                repeat=repeat,
                ledger_count=load.ledger_count,
                copies=copies,
                copy_bytes=copies * len(next(load.entries())),
                elapsed_s=elapsed_s,
                cpu_s=(cpu_then - cpu).total_s,
                bookies_cpu_s=(servers_then.bookies - servers.bookies).total_s,
                zookeeper_cpu_s=(servers_then.zookeeper - servers.zookeeper).total_s,
            )
            cpu, servers = cpu_then, servers_then
    finally:
        child.kill()


def _next_check(cluster: LocalCluster, child: Child, number: int) -> tuple[float, Cpu, ServersCpu]:
    """Wait for the given check. Return how long it took, and the CPU used until then."""
    deadline_s = time.monotonic() + CHECK_TIMEOUT_S
    while len(durations := _DONE.findall(child.log.read_text())) < number:
        if time.monotonic() > deadline_s or not child.is_running:
            raise UnavailableError(f"Java's check does not end:\n{child.log_tail()}")
        time.sleep(POLL_S)
    return int(durations[number - 1]) / 1_000, cpu_of([child.pid]), ServersCpu.now(cluster)
