"""Measures how fast entries are copied between real bookies, and the CPU of each: ``python -m
bench.copy_bench``.

The bench starts a local cluster, stores the same entries on two bookies, and copies them to a
third, one half from each. An entry is read, its digest checked, and it is written as recovery adds
are, with batch reads and without. CPU is of this process alone, user and system. The bookies share
the machine, so the rates depend on them as well; the CPU per entry is ours alone. Each figure is
given for the best and the median pass over the load. The best pass was disturbed least.
"""

import asyncio
import itertools
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.loading import store_entries
from daemon.local.cluster import LocalCluster
from ledgers.bookies import TRANSFER_ENTRIES_MAX, Transfer
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING, Budgets
from ledgers.digest import EntryDigest
from ledgers.model import BookieId, DigestType

DIGEST = EntryDigest(DigestType.CRC32C, b"")
SMALL_LEDGER_ENTRIES = 10
SMALL_LEDGERS_AT_ONCE = 200
STRETCH_ENTRIES = 64
"""A ledger with fewer entries is read from one source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``ledger_count`` ledgers of ``entry_count`` entries each, ids from ``first_ledger_id`` on."""

    name: str
    first_ledger_id: int
    ledger_count: int
    entry_count: int
    payload_bytes: int

    def entries(self) -> Iterator[bytes]:
        payload = os.urandom(self.payload_bytes)
        for ledger_id in self.ledger_ids:
            for entry_id in range(self.entry_count):
                length = (entry_id + 1) * len(payload)
                yield DIGEST.pack(
                    ledger_id=ledger_id,
                    entry_id=entry_id,
                    lac=entry_id - 1,
                    length=length,
                    payload=payload,
                )

    @property
    def ledger_ids(self) -> range:
        return range(self.first_ledger_id, self.first_ledger_id + self.ledger_count)


LOADS = (
    Load(name="100 B", first_ledger_id=1, ledger_count=1, entry_count=50_000, payload_bytes=100),
    Load(name="1 KB", first_ledger_id=2, ledger_count=1, entry_count=50_000, payload_bytes=1_024),
    Load(name="64 KB", first_ledger_id=3, ledger_count=1, entry_count=1_500, payload_bytes=65_536),
    Load(
        name=f"1 KB, ledgers of {SMALL_LEDGER_ENTRIES}",
        first_ledger_id=1_000,
        ledger_count=3_000,
        entry_count=SMALL_LEDGER_ENTRIES,
        payload_bytes=1_024,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass: all entries of a load are read (and written) once."""

    entry_count: int
    entry_bytes: int
    elapsed_s: float
    cpu_s: float

    @property
    def entries_per_s(self) -> float:
        return self.entry_count / self.elapsed_s

    @property
    def megabytes_per_s(self) -> float:
        return self.entry_bytes / self.elapsed_s / 1e6

    @property
    def cpu_us_per_entry(self) -> float:
        return self.cpu_s / self.entry_count * 1e6


@click.command()
@click.option("--duration-s", default=4.0, show_default=True, help="Of each measurement.")
@click.option("--only", multiple=True, help="A load's name; may be given several times.")
def main(duration_s: float, only: tuple[str, ...]) -> None:
    """Measure copying and verifying on a local cluster, and print a table."""
    loads = [load for load in LOADS if not only or load.name in only]
    table = Table(
        "load",
        "what",
        "cap",
        "reads",
        "entries/s",
        "MB/s",
        "our CPU us/entry",
        title="best / median",
    )
    with (
        tempfile.TemporaryDirectory(prefix="copy-bench-") as folder,
        LocalCluster.start(Path(folder), bookies=3) as cluster,
    ):
        for load in loads:
            for bookie in cluster.bookies[:2]:
                store_entries(bookie, load.entries(), master_key=DIGEST.master_key)
            for target, cap, reads_batches in itertools.product(
                (cluster.bookies[2], None),
                (64, READS_IN_FLIGHT_CEILING),
                (False, True),
            ):
                bulk = partial(
                    BulkTransfers,
                    Budgets(reads_in_flight_max=cap),
                    reads_batches=reads_batches,
                    yields=False,
                )
                passes = asyncio.run(
                    _measure(load, cluster.bookies[:2], target, bulk=bulk, duration_s=duration_s)
                )
                table.add_row(
                    load.name,
                    "copy" if target is not None else "verify",
                    str(cap),
                    "batch" if reads_batches else "single",
                    _best_and_median([p.entries_per_s for p in passes], max),
                    _best_and_median([p.megabytes_per_s for p in passes], max),
                    _best_and_median([p.cpu_us_per_entry for p in passes], min, digits=2),
                )
    Console().print(table)


async def _measure(
    load: Load,
    sources: tuple[BookieId, ...],
    target: BookieId | None,
    *,
    bulk: Callable[[], BulkTransfers],
    duration_s: float,
) -> list[Pass]:
    transfers = bulk()
    passes: list[Pass] = []
    try:
        await _run_all(transfers, load, sources, target)  # connections made, bookies warm
        started_s = time.monotonic()
        while not passes or time.monotonic() - started_s < duration_s:
            passes.append(await _pass(transfers, load, sources, target))
    finally:
        await transfers.close()
    return passes


async def _pass(
    bulk: BulkTransfers, load: Load, sources: tuple[BookieId, ...], target: BookieId | None
) -> Pass:
    entries_before, bytes_before = bulk.totals.entries_read, bulk.totals.read_bytes
    started_s, cpu_before_s = time.monotonic(), _cpu_s()
    await _run_all(bulk, load, sources, target)
    return Pass(
        entry_count=bulk.totals.entries_read - entries_before,
        entry_bytes=bulk.totals.read_bytes - bytes_before,
        elapsed_s=time.monotonic() - started_s,
        cpu_s=_cpu_s() - cpu_before_s,
    )


async def _run_all(
    bulk: BulkTransfers, load: Load, sources: tuple[BookieId, ...], target: BookieId | None
) -> None:
    """Copy all entries of the load once."""
    assert load.entry_count <= TRANSFER_ENTRIES_MAX
    at_once = asyncio.Semaphore(SMALL_LEDGERS_AT_ONCE)

    async def copy(ledger_id: int) -> None:
        transfer = Transfer(
            ledger_id=ledger_id,
            digest=DIGEST,
            reads=_halves(load.entry_count, sources, ledger_id),
            target=target,
            entry_bytes_hint=load.payload_bytes,
        )
        async with at_once:
            result = await bulk.transfer(transfer)
        if result.entry_count != load.entry_count:
            failed = {bookie: len(failures) for bookie, failures in result.failures.items()}
            raise click.ClickException(
                f"ledger {ledger_id}: {result.entry_count} of {load.entry_count} entries copied,"
                f" failed {failed}, {len(result.unwritten)} unwritten: {result.target_error}"
            )

    async with asyncio.TaskGroup() as group:
        for ledger_id in load.ledger_ids:
            group.create_task(copy(ledger_id))


def _halves(
    entry_count: int, sources: tuple[BookieId, ...], ledger_id: int
) -> dict[BookieId, range]:
    """Give each source one run of entries, as a copy plan would."""
    middle = entry_count // 2 if entry_count > STRETCH_ENTRIES else entry_count
    runs = (range(middle), range(middle, entry_count))
    turn = ledger_id % len(sources)
    return dict(zip((*sources[turn:], *sources[:turn]), runs, strict=True))


def _best_and_median(
    values: list[float], best: Callable[[list[float]], float], *, digits: int = 0
) -> str:
    return f"{best(values):,.{digits}f} / {statistics.median(values):,.{digits}f}"


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
