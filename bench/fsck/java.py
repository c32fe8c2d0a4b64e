"""Java's auditor checks all ledgers, every entry of every copy, again and again in one life of its
daemon.

Its check reads entries and verifies no digest. Its log tells how long a check took; the CPU is its
daemon's between the end of one check and the end of the next, less nothing: it is idle otherwise.
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
"""All entries, as soon as the last check is over."""
COPIES_OF_ENTRY = 3
CHECK_TIMEOUT_S = 120.0
POLL_S = 0.02
_DONE = re.compile(r"Completed checkAllLedgers \{durationMs=(\d+)\}")


def check_all_ledgers(cluster: LocalCluster, load: Load, *, repeats: int) -> Iterator[Pass]:
    """``load``: all that there is. The first check, while its code is being compiled, does not
    count.

    Raises UnavailableError.
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
    """When so many are done: how long the last one took, and what was used up until then."""
    deadline_s = time.monotonic() + CHECK_TIMEOUT_S
    while len(durations := _DONE.findall(child.log.read_text())) < number:
        if time.monotonic() > deadline_s or not child.is_running:
            raise UnavailableError(f"Java's check does not end:\n{child.log_tail()}")
        time.sleep(POLL_S)
    return int(durations[number - 1]) / 1_000, cpu_of([child.pid]), ServersCpu.now(cluster)
