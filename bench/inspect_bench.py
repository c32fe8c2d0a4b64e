"""Measures how many copies per second one process of fsck inspects: ``python -m
bench.inspect_bench``.

The bench starts a local cluster of three bookies, and stores closed ledgers with all entries on
each bookie. It inspects all of them at one level with ``auditor.fsck.executor``, without Spark. A
copy is an entry read from one bookie with its digest checked. At level ``full`` its fingerprint is
compared with those of the other copies. CPU is of this process alone. The bookies share the
machine, so the rates depend on them as well; the CPU per copy is ours alone.
"""

import asyncio
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from auditor.fsck.executor import inspect
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.verdicts import Grade, LedgerVerdict
from bench.loading import store_entries
from daemon.local.cluster import LocalCluster
from ledgers.codec.layout import MetadataUri
from ledgers.digest import EntryDigest
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment
from ledgers.zookeeper.store import ZooKeeperStore

DIGEST = EntryDigest(DigestType.CRC32C, b"")
CREATES_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``ledger_count`` ledgers of ``entry_count`` entries each, ids from ``first_ledger_id`` on."""

    name: str
    first_ledger_id: int
    ledger_count: int
    entry_count: int
    payload_bytes: int

    @property
    def ledger_ids(self) -> range:
        return range(self.first_ledger_id, self.first_ledger_id + self.ledger_count)

    def entries(self) -> Iterator[bytes]:
        payload = bytes(range(256)) * (self.payload_bytes // 256 + 1)
        for ledger_id in self.ledger_ids:
            for entry_id in range(self.entry_count):
                yield DIGEST.pack(
                    ledger_id=ledger_id,
                    entry_id=entry_id,
                    lac=entry_id - 1,
                    length=(entry_id + 1) * self.payload_bytes,
                    payload=payload[: self.payload_bytes],
                )


LOADS = (
    Load(name="100 B", first_ledger_id=1, ledger_count=10, entry_count=10_000, payload_bytes=100),
    Load(
        name="1 KB", first_ledger_id=101, ledger_count=10, entry_count=10_000, payload_bytes=1_024
    ),
    Load(name="64 KB", first_ledger_id=201, ledger_count=4, entry_count=400, payload_bytes=65_536),
    Load(
        name="1 KB, ledgers of 10",
        first_ledger_id=1_000,
        ledger_count=3_000,
        entry_count=10,
        payload_bytes=1_024,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass: all ledgers of a load are inspected once. The time includes opening the session."""

    ledger_count: int
    copies: int
    copy_bytes: int
    elapsed_s: float
    cpu_s: float


@click.command()
@click.option("--passes", default=3, show_default=True)
@click.option("--only", multiple=True, help="A load's name; may be given several times.")
@click.option("--level", "levels", multiple=True, type=click.Choice([each.value for each in Level]))
@click.option("--reads-in-flight", default=64, show_default=True, help="At each bookie.")
def main(passes: int, only: tuple[str, ...], levels: tuple[str, ...], reads_in_flight: int) -> None:
    """Measure what one process looks at on a local cluster, and print a table."""
    loads = [load for load in LOADS if not only or load.name in only]
    table = Table(
        "load", "level", "ledgers/s", "copies/s", "MB/s", "our CPU us/copy", title="best / median"
    )
    with (
        tempfile.TemporaryDirectory(prefix="inspect-bench-") as folder,
        LocalCluster.start(Path(folder), bookies=3) as cluster,
    ):
        for load in loads:
            for bookie in cluster.bookies:
                store_entries(bookie, load.entries(), master_key=DIGEST.master_key)
            asyncio.run(create_ledgers(cluster, load))
            for level in map(Level, levels or [each.value for each in Level]):
                options = FsckOptions(
                    metadata_service_uri=cluster.metadata_service_uri,
                    level=level,
                    sample_share=0.1,
                    reads_in_flight_per_bookie=reads_in_flight,
                )
                done = [asyncio.run(_pass(options, load)) for _ in range(passes)]
                table.add_row(load.name, level.value, *_figures(done))
    Console().print(table)


def _figures(done: list[Pass]) -> list[str]:
    def told(
        figure: Callable[[Pass], float], best: Callable[[list[float]], float], digits: int
    ) -> str:
        values = [figure(each) for each in done]
        return f"{best(values):,.{digits}f} / {statistics.median(values):,.{digits}f}"

    return [
        told(lambda each: each.ledger_count / each.elapsed_s, max, 0),
        told(lambda each: each.copies / each.elapsed_s, max, 0),
        told(lambda each: each.copy_bytes / each.elapsed_s / 1e6, max, 0),
        told(lambda each: each.cpu_s / max(1, each.copies) * 1e6, min, 2),
    ]


async def create_ledgers(cluster: LocalCluster, load: Load) -> None:
    """Create the metadata of the ledgers: closed, with every entry on all bookies."""
    uri = MetadataUri.parse(cluster.metadata_service_uri)
    store = await ZooKeeperStore.open(uri.hosts)
    try:
        manager = await LedgerManager.open(store, uri)
        ids = load.ledger_ids
        for start in range(0, len(ids), CREATES_AT_ONCE):
            part = ids[start : start + CREATES_AT_ONCE]
            await asyncio.gather(
                *(manager.create(i, _metadata(load, cluster.bookies)) for i in part)
            )
    finally:
        await store.close()


def _metadata(load: Load, bookies: tuple[BookieId, ...]) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        last_entry_id=load.entry_count - 1,
        length=load.entry_count * load.payload_bytes,
        digest_type=DigestType.CRC32C,
        password=b"",
        segments=(Segment(first_entry_id=0, ensemble=bookies[:3]),),
    )


async def _pass(options: FsckOptions, load: Load) -> Pass:
    copies = copy_bytes = ledger_count = 0
    started_s, cpu_before_s = time.monotonic(), cpu_s()

    async def count(verdict: LedgerVerdict) -> None:
        nonlocal copies, copy_bytes, ledger_count
        if verdict.grade is not Grade.WHOLE:
            raise click.ClickException(f"ledger {verdict.ledger_id} is not whole: {verdict}")
        ledger_count += 1
        copies += verdict.entries_read
        copy_bytes += verdict.bytes_read

    await inspect(options, load.ledger_ids, count)
    if ledger_count != load.ledger_count:
        raise click.ClickException(f"{ledger_count} of {load.ledger_count} ledgers were looked at")
    return Pass(
        ledger_count=ledger_count,
        copies=copies,
        copy_bytes=copy_bytes,
        elapsed_s=time.monotonic() - started_s,
        cpu_s=cpu_s() - cpu_before_s,
    )


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
