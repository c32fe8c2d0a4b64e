"""How far the archive is behind, how large it is, how long a restore takes, and what marks wait:
``python -m bench.archive``.

Parts that are not selected (``--only``) keep their earlier results.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from archive.format import FileKind, decode_header, file_name
from archive.places import Directory
from archive.reading import Archive
from bench.feed import (
    LEDGER_IDS,
    NODE,
    OTHERS_SHARE,
    SETTLE_S,
    VICTIM_LEDGER_IDS,
    WARM_UP_S,
    FeedGround,
    following,
    lose_victim,
    of_part,
    open_ground,
    others_share,
    parts_sections,
)
from bench.records import Record, Records
from bench.report import CORES, Goal, failures_section, goals_section
from bench.session import Session, bench_session, chosen, quick_option, results_option
from bench.usage import forget_rss_max, rss_bytes, rss_bytes_max
from bench.waiting import wait_until
from bench.znodes import PULSAR_BOOKIES, ZOOKEEPER_FLAGS, ZOOKEEPER_HEAP_MIB, pulsar_ledgers
from daemon.local.processes import Child
from daemon.local.servers import zookeeper_monitor
from daemon.operations.archive import enable_archive
from ledgers.clock import SystemClock
from ledgers.errors import UnavailableError
from tests.znode_cluster import ROOT
from tests.zookeeper_server import running_zookeeper

LAG, WHOLE = "lag", "whole"
LEDGERS, QUICK_LEDGERS = 1_000_000, 20_000
CHANGES_PER_S, DURATION_S, QUICK_DURATION_S = 1_000, 30.0, 5.0
LOSSES, QUICK_LOSSES = 10, 2
TIMEOUT_S, POLL_S = 1_800.0, 0.01
JVM_FLAGS = (*ZOOKEEPER_FLAGS, f"-Xmx{ZOOKEEPER_HEAP_MIB}m")


@click.command()
@click.option("--only", default=f"{LAG},{WHOLE}", show_default=True)
@click.option("--ledgers", default=LEDGERS, show_default=True, help=f"Of the part {WHOLE}.")
@quick_option
@results_option
def main(only: str, ledgers: int, quick: bool, results: Path | None) -> None:
    """Measure the archive."""
    count = QUICK_LEDGERS if quick else ledgers
    is_kept = not quick and ledgers == LEDGERS
    parts: dict[str, tuple[str, Callable[[Session, Path], Coroutine[Any, Any, Record]]]] = {
        LAG: (LAG, lambda session, folder: measure_lag(folder, quick)),
        WHOLE: (WHOLE, lambda session, folder: measure_whole(session, folder, count, quick)),
    }
    with bench_session("archive", report, results=results, is_kept=is_kept) as session:
        for name, measure in chosen(parts, only):
            with session.attempt(name), tempfile.TemporaryDirectory(prefix="bench-") as folder:
                others = others_share()
                found = asyncio.run(measure(session, Path(folder)))
                values = {**found.values, OTHERS_SHARE: others}
                session.add(Record(name=name, values=values, text=found.text))


@asynccontextmanager
async def archiving_node(ground: FeedGround) -> AsyncIterator[Child]:
    """Run a second node, which archives when that is ordered: the leader lets it go first."""
    child = replace(NODE, name="archiver").start(ground.arena.cluster)
    try:
        yield child
    finally:
        child.kill()


async def _enable(ground: FeedGround, folder: Path) -> None:
    url, clock = f"file://{folder}/archive", SystemClock()
    await enable_archive(ground.arena.seen, url, includes=(), retention_s=86_400, clock=clock)


async def _wait_base(place: Directory, node: Child) -> None:
    await wait_until(lambda: any(Archive(place).bases()), "a base", timeout_s=TIMEOUT_S, child=node)


# --- The lag --------------------------------------------------------------------------------------


async def measure_lag(folder: Path, is_quick: bool) -> Record:
    """Measure the time from the request of a write until a file of the archive has it, or a later
    state of the ledger."""
    place, ends, arrived_s = Directory(folder / "archive"), list[int](), list[float]()

    async def watch() -> None:
        """Note the last checkpoint of each new segment, and when its file appeared."""
        number = max(Archive(place).numbers()) + 1
        while True:
            if (data := place.read(file_name(number))) is None:
                await asyncio.sleep(POLL_S)
                continue
            header = decode_header(data, name=file_name(number))[0]
            if header.kind is FileKind.SEGMENT:
                ends.append(header.end)
                arrived_s.append(time.monotonic())
            number += 1

    async with open_ground() as ground, archiving_node(ground) as node:
        await ground.enable_feed()
        await _enable(ground, folder)
        await _wait_base(place, node)
        load = ground.load(CHANGES_PER_S)
        await load.run(WARM_UP_S)
        watching = asyncio.create_task(watch())
        result = await load.run(QUICK_DURATION_S if is_quick else DURATION_S)
        last = result.zxids[-1]
        await wait_until(lambda: last <= max(ends, default=0), "all", timeout_s=TIMEOUT_S)
        watching.cancel()
    lags_s = sorted(
        arrived_s[bisect_left(ends, zxid)] - sent_s
        for zxid, sent_s in zip(result.zxids, result.sent_s, strict=True)
    )
    median_s, p99_s = median(lags_s), lags_s[len(lags_s) * 99 // 100]
    return Record(
        name=LAG,
        values={"median_s": median_s, "p99_s": p99_s},
        text=f"{result.count:,} changes at {result.per_s:,.0f}/s: archived after a median of "
        f"{median_s:.2f} s, p99 {p99_s:.2f} s, in {len(ends)} segments",
    )


# --- The whole archive ----------------------------------------------------------------------------


async def measure_whole(session: Session, folder: Path, count: int, is_quick: bool) -> Record:
    """Archive many ledgers, while a bookie is lost again and again, and restore them."""
    place = Directory(folder / "archive")
    total = count + len(LEDGER_IDS) + len(VICTIM_LEDGER_IDS)
    ledgers = pulsar_ledgers(count)
    async with (
        open_ground(ledgers, bookies=PULSAR_BOOKIES, zookeeper_jvm_flags=JVM_FLAGS) as ground,
        archiving_node(ground) as node,
    ):
        async with following(ground) as meter:
            await ground.enable_feed()
            await wait_until(lambda: meter.count >= total, "the feed", timeout_s=TIMEOUT_S)
        await asyncio.sleep(SETTLE_S)
        alone_ms = [await lose_victim(ground) for _ in range(QUICK_LOSSES if is_quick else LOSSES)]
        session.say(f"first marks without an archive: {alone_ms} ms")
        rss, beside_ms = rss_bytes(node.pid), list[float]()
        forget_rss_max(node.pid)
        await _enable(ground, folder)
        await wait_until(lambda: bool(Archive(place).numbers()), "a file", timeout_s=TIMEOUT_S)
        began_s = time.monotonic()
        waiting = asyncio.create_task(_wait_base(place, node))
        while not waiting.done():
            beside_ms.append(await lose_victim(ground))
        await waiting
        base_s, rss_max = time.monotonic() - began_s, rss_bytes_max(node.pid)
        session.say(f"first marks beside a base: {beside_ms} ms")
        size = sum(path.stat().st_size for path in (folder / "archive").iterdir())
    session.say("restoring")
    restored_s = await _restore(folder, total)
    values = {"first_mark_ms": median(beside_ms), "restore_s": restored_s, "size_mb": size / 1e6}
    values["memory_mb"] = (rss_max - rss) / 1e6
    beside, alone = (
        f"median {median(waits_ms):.0f} ms, most {max(waits_ms):.0f} ms of {len(waits_ms)}"
        for waits_ms in (beside_ms, alone_ms)
    )
    return Record(
        name=WHOLE,
        values=values,
        text=f"{total:,} ledgers: base after {base_s:.0f} s, restored in {restored_s:.0f} s\n"
        f"  first mark after a loss: beside the base {beside}; without archive {alone}\n"
        f"  memory of the node that archives: {rss / 1e6:.0f} MB, at most {rss_max / 1e6:.0f} MB",
    )


async def _restore(folder: Path, total: int) -> float:
    """Restore the archive into an empty ZooKeeper with the command. Return the seconds it took.
    Raises UnavailableError if ledgers are missing."""
    data, heap_mib = folder / "empty", ZOOKEEPER_HEAP_MIB
    with running_zookeeper(data, heap_mib=heap_mib, flags=ZOOKEEPER_FLAGS) as server:
        uri = f"zk+hierarchical://{server.address}{ROOT}"
        arguments = ["archive", "restore", "cluster", "--from", f"file://{folder}/archive", "--yes"]
        child = Child(
            "restore",
            [sys.executable, "-m", "daemon", *arguments],
            log=folder / "restore.log",
            environment=os.environ | {"BOOKMENDER_METADATA_SERVICE_URI": uri},
        )
        began_s = time.monotonic()
        await wait_until(lambda: not child.is_running, "the restore", timeout_s=TIMEOUT_S)
        took_s = time.monotonic() - began_s
        znode_count = int(zookeeper_monitor(server.port)["zk_znode_count"])
    if child.exit_code != 0 or znode_count < total:
        raise UnavailableError(f"ledgers are missing: {child.log_tail()}", znode_count=znode_count)
    return took_s


# --- The report -----------------------------------------------------------------------------------

PREAMBLE = f"# The archive\n\nAll runs on one machine with {CORES} cores. See `bench/README.md`.\n"
GOALS = [
    Goal(title, of_part(part, name), must, aim, unit=unit, digits=digits)
    for part, name, must, aim, unit, digits, title in (
        (LAG, "p99_s", 3, 1, " s", 2, "change to archive at 1,000 changes/s, p99"),
        (WHOLE, "size_mb", 60, 40, " MB", 1, "size of 1,000,000 ledgers of Pulsar"),
        (WHOLE, "restore_s", 600, 240, " s", 0, "restore of 1,000,000 ledgers, ids included"),
        (WHOLE, "first_mark_ms", 100, 30, " ms", 0, "first mark beside a base"),
        (WHOLE, "memory_mb", 100, 40, " MB", 0, "memory that a node gains by a base"),
    )
]


def report(records: Records) -> str:
    head = [PREAMBLE, *failures_section(records), goals_section(GOALS, records)]
    return "\n".join((*head, *parts_sections(records, (LAG, WHOLE))))


if __name__ == "__main__":
    main()
