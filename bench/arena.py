"""The cluster of every bench with real bookies: ZooKeeper, bookies, the ledgers on them, and the
verification of their copies.

Bookies run with the memory and the compiler that an operator would give them. ZooKeeper does not
wait for the disk.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from bench.journals import added_bytes
from bench.loading import store_entries
from bench.loads import DIGEST, VICTIM_INDEX, BenchLedger, Load
from daemon.admin_session import AdminSession, admin_session
from daemon.local.cluster import LocalCluster
from daemon.local.spec import port_of
from daemon.settings import Settings
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.store import ANY_VERSION
from tests.java.messages import Verdict
from tests.java.tool import JavaTool, Report

JVM_FLAGS = ("-XX:TieredStopAtLevel=4", "-XX:ReservedCodeCacheSize=240m")
BOOKIE_JVM_FLAGS = (*JVM_FLAGS, "-Xmx256m", "-XX:MaxDirectMemorySize=256m")
REPAIR_BOOKIES, REPAIR_SESSION_TIMEOUT_S = 5, 2.0
"""Of the benches that kill a bookie. A short session timeout is only lost time before a repair."""
BOOKIE_SETTINGS = {
    "journalMaxBackups": "20",  # ``journals`` counts the entries in them
    "openFileLimit": "2000",  # the default of 20,000 is the whole limit of a process on many hosts
}
FIRST_LEDGER_ID = 1_000_000
"""Far above the ids that the id generator gives to a writer beside the load."""
REQUESTS_AT_ONCE = 200
CLOCK_ERROR_S = 1.0
"""Error of a file's modification time. Reading one journal too many costs little."""


@dataclass(slots=True)
class Arena:
    """One cluster, and the operations of the bench on it, except the kill."""

    cluster: LocalCluster
    seen: AdminSession
    java: JavaTool | None
    _written_since_s: float = 0.0
    _ledger_ids: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_LEDGER_ID))

    @property
    def victim(self) -> BookieId:
        return self.cluster.bookies[VICTIM_INDEX]

    @property
    def survivors(self) -> list[BookieId]:
        return [bookie for bookie in self.cluster.bookies if bookie != self.victim]

    async def write(
        self, load: Load, *, bookies: Sequence[BookieId] | None = None
    ) -> list[BenchLedger]:
        """Write the ledgers of the load, with each copy of each entry in its place. ``bookies``:
        the ones that store them; None: all."""
        bookies = bookies or self.cluster.bookies
        self._written_since_s = time.time() - CLOCK_ERROR_S
        count = sum(part.ledger_count for part in load.parts)
        first = next(self._ledger_ids)
        self._ledger_ids = itertools.count(first + count)
        ledgers = load.ledgers(bookies, first_ledger_id=first)
        # Metadata is written first. A bookie's garbage collector, which runs every 15 minutes,
        # deletes entries of ledgers without metadata.
        manager = self.seen.manager
        await _each(ledgers, lambda ledger: manager.create(ledger.ledger_id, ledger.metadata()))
        await asyncio.gather(*(asyncio.to_thread(_fill, bookie, ledgers) for bookie in bookies))
        return ledgers

    async def judge(self, ledgers: Sequence[BenchLedger]) -> int:
        """Return the number of copies that BookKeeper's own client read. Raises UnavailableError
        unless all of them are good."""
        assert self.java is not None, "opened without a judge"
        ledger_ids = [ledger.ledger_id for ledger in ledgers]
        ask = partial(self.java.judge, self.cluster.metadata_service_uri, ledger_ids)
        report = await asyncio.to_thread(ask)
        if report.verdict is not Verdict.WHOLE:
            summary = report.summary
            raise UnavailableError(
                "the judge finds copies missing",
                verdict=report.verdict.value,
                copies=summary.copies,
                good=summary.good,
                problems=_problems(report),
            )
        return report.summary.copies

    async def delete(self, ledgers: Sequence[BenchLedger]) -> None:
        manager = self.seen.manager
        await _each(ledgers, lambda ledger: manager.delete(ledger.ledger_id, version=ANY_VERSION))

    async def judge_and_restore(
        self, ledgers: Sequence[BenchLedger], *, is_judged: bool = True
    ) -> int:
        """Delete these ledgers and start the victim again, as before the loss. Judge the copies
        meanwhile: the victim stores nothing that the judge reads. Return their number."""
        reviving = asyncio.create_task(asyncio.to_thread(self.cluster.start_bookie, self.victim))
        try:
            copies = await self.judge(ledgers) if is_judged else 0
        finally:
            await reviving
        await self.delete(ledgers)
        return copies

    async def copied_bytes(self, ledgers: Sequence[BenchLedger]) -> int:
        """Return the bytes that the survivors stored of the ledgers written last, without those
        that ``write`` stored."""
        ledger_ids = frozenset(ledger.ledger_id for ledger in ledgers)
        written = sum(
            len(ledger.stripe(bookie)) * ledger.part.entry_bytes
            for ledger in ledgers
            for bookie in self.survivors
        )
        since_s = self._written_since_s

        def stored() -> int:
            journals = map(self._journals, self.survivors)
            return sum(added_bytes(each, ledger_ids, since_s=since_s) for each in journals)

        return await asyncio.to_thread(stored) - written

    def _journals(self, bookie: BookieId) -> Path:
        return self.cluster.data / "bookies" / str(port_of(bookie)) / "journal"

    def packets(self) -> int:
        """Return the packets that ZooKeeper has received so far, without this process's own
        requests."""
        monitor = self.cluster.zookeeper_monitor()
        return int(monitor["zk_packets_received"]) - self.seen.store.request_count


@asynccontextmanager
async def open_arena(
    java: JavaTool | None = None,
    *,
    bookies: int = 3,
    session_timeout_s: float | None = None,
    zookeeper_jvm_flags: tuple[str, ...] | None = None,
) -> AsyncIterator[Arena]:
    """Open a new arena. ``java``: the judge. ``session_timeout_s``: of the bookies."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        LocalCluster.start(
            Path(folder),
            bookies=bookies,
            session_timeout_s=session_timeout_s,
            bookie_settings=BOOKIE_SETTINGS,
            bookie_jvm_flags=BOOKIE_JVM_FLAGS,
            zookeeper_jvm_flags=zookeeper_jvm_flags,
        ) as cluster,
    ):
        async with admin_session(
            Settings(metadata_service_uri=cluster.metadata_service_uri)
        ) as seen:
            yield Arena(cluster, seen, java)


def repair_arena(java: JavaTool) -> AbstractAsyncContextManager[Arena]:
    """Open an arena for losses of a bookie."""
    return open_arena(java, bookies=REPAIR_BOOKIES, session_timeout_s=REPAIR_SESSION_TIMEOUT_S)


def _problems(report: Report) -> str:
    """Return the problems with the number of ledgers that have them, and an example of each."""
    found: dict[str, list[int]] = {}
    for ledger in report.ledgers.values():
        kinds = [*ledger.problems, *(f"{bookie} is gone" for bookie in ledger.gone_bookies)]
        if ledger.verdict is not Verdict.WHOLE:
            found.setdefault(", ".join(kinds) or str(ledger.error), []).append(ledger.ledger)
    return "; ".join(f"{kind}: {len(ids)} ledgers, e.g. {ids[0]}" for kind, ids in found.items())


def _fill(bookie: BookieId, ledgers: Sequence[BenchLedger]) -> None:
    entries = chain.from_iterable(ledger.entries(bookie) for ledger in ledgers)
    store_entries(bookie, entries, master_key=DIGEST.master_key)


async def _each(
    ledgers: Iterable[BenchLedger], action: Callable[[BenchLedger], Awaitable[object]]
) -> None:
    slots = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def act(ledger: BenchLedger) -> None:
        async with slots:
            await action(ledger)

    await asyncio.gather(*map(act, ledgers))
