"""Measures how fast entries are copied between real bookies, and the CPU of each: ``python -m
bench.copy_bench``.

The bench stores the same entries on two bookies, and copies them to a third, one half from each. An
entry is read, its digest checked, and it is written as recovery adds are, with batch reads and
without. CPU is of this process alone, user and system. The bookies share the machine, so the rates
depend on them as well; the CPU per entry is ours alone. Each figure is given for the best and the
median pass over the load. The best pass was disturbed least.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

from bench.arena import open_arena
from bench.loads import DIGEST, BenchLedger, Load, alike
from bench.records import Record
from bench.report import named, rate, table
from ledgers.bookies import TRANSFER_ENTRIES_MAX, Transfer
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING, Budgets
from ledgers.model import BookieId

SMALL_LEDGERS_AT_ONCE = 200
STRETCH_ENTRIES = 64
"""A ledger with fewer entries is read from one source."""
LOADS = [
    alike(name, name, ledgers, entries, payload_bytes=size, ensemble_size=2, write_quorum=2)
    for name, ledgers, entries, size in (
        ("100 B", 1, 50_000, 100),
        ("1 KB", 1, 50_000, 1_024),
        ("64 KB", 1, 1_500, 65_536),
        ("1 KB, ledgers of 10", 3_000, 10, 1_024),
    )
]
FIGURES = (
    rate("entries", "elapsed_s", "entries/s", more_is_better=True),
    rate("bytes", "elapsed_s", "MB/s", scale=1e-6, more_is_better=True),
    named("cpu_us", "our CPU us/entry", digits=2),
)


@click.command()
@click.option("--duration-s", default=4.0, show_default=True, help="Of each measurement.")
@click.option("--only", multiple=True, help="A load's name; may be given several times.")
def main(duration_s: float, only: tuple[str, ...]) -> None:
    """Measure copying and verifying on a local cluster, and print a table."""
    loads = [load for load in LOADS if not only or load.name in only]
    click.echo(asyncio.run(_run(loads, duration_s)))


async def _run(loads: Sequence[Load], duration_s: float) -> str:
    rows = []
    async with open_arena() as arena:
        *sources, third = arena.cluster.bookies
        for load in loads:
            # Ledgers on the first two bookies only; the third gets the copies.
            ledgers = await arena.write(load, bookies=sources)
            for target, cap, reads_batches in itertools.product(
                (third, None), (64, READS_IN_FLIGHT_CEILING), (False, True)
            ):
                bulk = partial(
                    BulkTransfers,
                    Budgets(reads_in_flight_max=cap),
                    reads_batches=reads_batches,
                    yields=False,
                )
                passes = await _measure(ledgers, target, bulk=bulk, duration_s=duration_s)
                rows.append(
                    [
                        load.name,
                        "copy" if target is not None else "verify",
                        str(cap),
                        "batch" if reads_batches else "single",
                        *(
                            figure.summary(passes).text(figure.digits, has_best=True)
                            for figure in FIGURES
                        ),
                    ]
                )
    return table(["load", "what", "cap", "reads", *(figure.title for figure in FIGURES)], rows)


async def _measure(
    ledgers: Sequence[BenchLedger],
    target: BookieId | None,
    *,
    bulk: Callable[[], BulkTransfers],
    duration_s: float,
) -> list[Record]:
    """Return one record for each pass, in which all entries were read (and written) once."""
    transfers = bulk()
    passes: list[Record] = []
    try:
        await _copy_all(transfers, ledgers, target)  # connections made, bookies warm
        started_s = time.monotonic()
        while not passes or time.monotonic() - started_s < duration_s:
            entries, size = transfers.totals.entries_read, transfers.totals.read_bytes
            began_s, cpu_s = time.monotonic(), time.process_time()
            await _copy_all(transfers, ledgers, target)
            entries = transfers.totals.entries_read - entries
            values = {
                "entries": entries,
                "bytes": transfers.totals.read_bytes - size,
                "elapsed_s": time.monotonic() - began_s,
                "cpu_us": 1e6 * (time.process_time() - cpu_s) / entries,
            }
            passes.append(Record(name="pass", values=values))
    finally:
        await transfers.close()
    return passes


async def _copy_all(
    bulk: BulkTransfers, ledgers: Sequence[BenchLedger], target: BookieId | None
) -> None:
    at_once = asyncio.Semaphore(SMALL_LEDGERS_AT_ONCE)

    async def copy(ledger: BenchLedger) -> None:
        count = ledger.part.entry_count
        assert count <= TRANSFER_ENTRIES_MAX
        # Each source gives one run of entries, as in a copy plan.
        middle = count // 2 if count > STRETCH_ENTRIES else count
        runs = (range(middle), range(middle, count))
        transfer = Transfer(
            ledger_id=ledger.ledger_id,
            digest=DIGEST,
            reads=dict(zip(ledger.ensemble, runs, strict=True)),
            target=target,
            entry_bytes_hint=ledger.part.payload_bytes,
        )
        async with at_once:
            result = await bulk.transfer(transfer)
        if result.entry_count != count:
            failed = {bookie: len(failures) for bookie, failures in result.failures.items()}
            raise click.ClickException(
                f"ledger {ledger.ledger_id}: {result.entry_count} of {count} entries copied,"
                f" failed {failed}, {len(result.unwritten)} unwritten: {result.target_error}"
            )

    async with asyncio.TaskGroup() as group:
        for ledger in ledgers:
            group.create_task(copy(ledger))


if __name__ == "__main__":
    main()
