"""How fast changes get into the change feed, how soon followers see them, and what marks wait:
``python -m bench.feed``.

Everything runs on this machine: ZooKeeper, three bookies, a node of ours, a load that changes
metadata (``feed_load``), and a follower of the log in this process. Every record is written at
once. Parts that are not selected (``--only``) keep their earlier results.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from auditor.mark_reasons import read_losses
from bench.arena import JVM_FLAGS, Arena, open_arena
from bench.contenders import OURS, elected, wait_ledger_map
from bench.feed_load import LoadResult, MetadataLoad, changing_metadata, prepare_writes
from bench.records import Record, Records
from bench.report import CORES, Goal, Summary, failures_section, goals_section, named
from bench.session import Session, bench_session, chosen, quick_option, results_option
from bench.usage import cpu_of, cpu_of_machine
from bench.waiting import wait_until
from checkpoints.chain import FeedChain, order_change, read_chain
from checkpoints.log import CheckpointLog
from checkpoints.model import Checkpoint
from daemon.local.processes import Child
from ledgers.client import open_bookies
from ledgers.clock import SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata
from ledgers.registration import READ_ONLY
from ledgers.store import ANY_VERSION, Delete, MetadataStore, SetData, Stat
from ledgers.zookeeper.store import ZooKeeperStore
from replication import znodes
from replication.marks import marked_ledger_ids
from replication.znodes import Audit, ClusterPaths
from tests.znode_cluster import ROOT, ZnodeCluster, closed

LOG, FIRST_MARK = "log", "first-mark"
RATES_PER_S = (1_000, 5_000, 10_000, 0)
"""0: as many as possible. The latencies of the first count."""
BESIDE_PER_S, LOSSES = 5_000, 10
LEDGER_IDS = range(10_000_000, 10_020_000)
ZOOKEEPER_JVM_FLAGS = (*JVM_FLAGS, "-Xmx512m")
SESSION_TIMEOUT_S = 30.0
WARM_UP_S = 5.0
"""Time for the compilers of ZooKeeper and the bookies, under the load that is measured then."""
DURATION_S, QUICK_DURATION_S = 10.0, 2.0
TIMEOUT_S = 300.0
NODE = replace(
    OURS, settings={"replication.enabled": "false", "node.nice": "0", "log.format": "json"}
)
POLL_S, MARK_POLL_S, SETTLE_S = 0.01, 0.05, 1.0
WATCHED_S = 2.0
"""The machine is watched for this time before each part."""
VICTIM = BookieId("127.1.0.1:3181")
"""A bookie that is only a registration."""
VICTIM_LEDGER_IDS = range(20_000_000, 20_000_200)
CLOCK = "/bench-clock"
"""Written together with the loss, to learn its time by ZooKeeper's clock."""


@click.command()
@click.option("--only", default=f"{LOG},{FIRST_MARK}", show_default=True)
@quick_option
@results_option
def main(only: str, quick: bool, results: Path | None) -> None:
    """Measure the change feed."""
    parts = {LOG: (LOG, measure_log), FIRST_MARK: (FIRST_MARK, measure_first_mark)}
    with bench_session("feed", report, results=results, is_kept=not quick) as session:
        for name, part in chosen(parts, only):
            with session.attempt(name):
                others = others_share()
                found = asyncio.run(_measure(part, session, quick))
                values = {**found.values, OTHERS_SHARE: others}
                session.add(Record(name=name, values=values, text=found.text))


def others_share() -> float:
    """Watch the machine while this bench does nothing, and return the share of its cores in use."""
    before, began_s = cpu_of_machine(), time.monotonic()
    time.sleep(WATCHED_S)
    used_s = cpu_of_machine() - before
    return used_s / (CORES * (time.monotonic() - began_s))


# --- The ground -----------------------------------------------------------------------------------


@dataclass(slots=True)
class FeedGround:
    """A cluster with ledgers that exist only as metadata, and a node of ours that leads.
    ``writes``: prepared changes of all ledgers."""

    arena: Arena
    store: MetadataStore
    paths: ClusterPaths
    writes: Sequence[bytes]
    node: Child

    def load(self, per_s: int = 0) -> MetadataLoad:
        return MetadataLoad(self.arena.cluster.zookeeper_address, self.writes, per_s=per_s)

    async def enable_feed(self) -> None:
        """Enable the feed, if it is not."""
        stored = await read_chain(self.store, self.paths)
        if stored.value is None or not stored.value.is_enabled:
            await self._order(
                lambda chain, now_ms: chain.enabled(now_ms=now_ms, by="bench", retention_s=3_600)
            )

    async def disable_feed(self) -> None:
        await self._order(lambda chain, now_ms: chain.disabled(now_ms=now_ms, by="bench"))

    async def _order(self, change: Callable[[FeedChain, int], FeedChain]) -> None:
        now_ms = SystemClock().wall_ms()
        await order_change(self.store, self.paths, lambda chain: change(chain, now_ms))


@asynccontextmanager
async def open_ground(
    ledgers: Iterable[tuple[int, LedgerMetadata]] = (),
    *,
    bookies: Sequence[BookieId] = (),
    zookeeper_jvm_flags: tuple[str, ...] = ZOOKEEPER_JVM_FLAGS,
) -> AsyncIterator[FeedGround]:
    """Start a cluster and a node that leads. Besides the ledgers that the load changes there are
    those of the victim. ``ledgers``, ``bookies``: more of them, which are only znodes."""
    async with open_arena(zookeeper_jvm_flags=zookeeper_jvm_flags) as arena:
        store, paths, real = arena.seen.store, arena.seen.paths, arena.cluster.bookies
        for bookie in (VICTIM, *bookies):
            await _register(store, bookie)
        cluster = ZnodeCluster(store)
        await cluster.create_ledgers(ledgers)
        await cluster.create_ledgers((i, changing_metadata(i, real)[0]) for i in LEDGER_IDS)
        await cluster.create_ledgers((i, closed(VICTIM, *real[:2])) for i in VICTIM_LEDGER_IDS)
        await store.create(CLOCK)
        # All ledgers count as just checked: the bookies have no entries of them.
        now = znodes.audit_time_to_bytes(SystemClock().wall_ms())
        await store.create(paths.audit_time(Audit.ALL_LEDGERS), now, with_parents=True)
        writes = prepare_writes(arena.seen.manager, LEDGER_IDS, real)
        async with elected(NODE, arena.cluster, store, paths) as node:
            await wait_ledger_map(node, timeout_s=TIMEOUT_S)
            yield FeedGround(arena, store, paths, writes, node)


async def _register(store: MetadataStore, bookie: BookieId) -> None:
    """Register a bookie that does not exist until the session ends. It is read-only, so that the
    feed is not written to it."""
    await store.create(f"{ROOT}/cookies/{bookie}", with_parents=True)
    await store.create(_registration(bookie), is_ephemeral=True, with_parents=True)


def _registration(bookie: BookieId) -> str:
    return f"{ROOT}/available/{READ_ONLY}/{bookie}"


async def _measure(
    part: Callable[[Session, FeedGround, bool], Awaitable[Record]], session: Session, is_quick: bool
) -> Record:
    async with open_ground() as ground:
        return await part(session, ground, is_quick)


# --- The log --------------------------------------------------------------------------------------


class Meter:
    """A listener that notes when each version arrives."""

    def __init__(self) -> None:
        self.count = self.last_id = 0
        self.arrived_s: dict[int, float] = {}
        self.last_s = 0.0

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.last_s = now_s = time.monotonic()
        self.count += len(checkpoint.spans)
        self.last_id = checkpoint.id
        self.arrived_s.update((span.end, now_s) for span in checkpoint.spans)


@asynccontextmanager
async def following(ground: FeedGround) -> AsyncIterator[Meter]:
    """Follow the log, with a ZooKeeper session of its own."""
    meter, cluster = Meter(), ground.arena.cluster
    store = await ZooKeeperStore.open(
        cluster.zookeeper_address, session_timeout_s=SESSION_TIMEOUT_S
    )
    try:
        async with open_bookies(reads_in_flight_max=64) as bookies:
            uri = MetadataUri.parse(cluster.metadata_service_uri)
            log = CheckpointLog(
                store=store,
                paths=ground.paths,
                manager=await LedgerManager.open(store, uri),
                bookies=bookies,
                clock=SystemClock(),
            )
            log.register_checkpoint_listener(meter)
            task = asyncio.create_task(log.run())
            try:
                yield meter
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    finally:
        await store.close()


async def measure_log(session: Session, ground: FeedGround, is_quick: bool) -> Record:
    """Measure how changes get into the log, and how soon the follower has them, at each rate."""
    figures, texts = [], []
    for per_s in RATES_PER_S:
        duration_s = QUICK_DURATION_S if is_quick else DURATION_S
        values, text = await measure_rate(ground, per_s, duration_s)
        session.say(text)
        figures.append(values)
        texts.append(text)
    fastest = max(each["changes_per_s"] for each in figures)
    return Record(name=LOG, values=figures[0] | {"changes_per_s": fastest}, text="\n".join(texts))


async def measure_rate(
    ground: FeedGround, per_s: int, duration_s: float
) -> tuple[dict[str, float], str]:
    """Measure a load at this rate; 0: as many as possible. Enables the feed.

    Latency: from the request of a write to its arrival at the follower. Versions that were
    superseded never arrive.
    """
    cluster = ground.arena.cluster
    pids: tuple[list[int | None], ...] = (
        [ground.node.pid],
        [cluster.zookeeper_pid],
        [cluster.pid(bookie) for bookie in cluster.bookies],
        [os.getpid()],
    )
    async with following(ground) as meter:
        await ground.enable_feed()
        load = ground.load(per_s)
        warm = await load.run(WARM_UP_S)
        await _arrived(meter, warm)
        await asyncio.sleep(SETTLE_S)
        meter.count = 0
        meter.arrived_s.clear()
        before, machine = [cpu_of(each) for each in pids], cpu_of_machine()
        result = await load.run(duration_s)
        await _arrived(meter, result)
        took_s = time.monotonic() - result.began_s
        used_s = [cpu_of(each) - then for each, then in zip(pids, before, strict=True)]
        others_s = max(0.0, cpu_of_machine() - machine - sum(used_s))
    waits_ms = sorted(
        1000 * (meter.arrived_s[zxid] - sent_s)
        for zxid, sent_s in zip(result.zxids, result.sent_s, strict=True)
        if zxid in meter.arrived_s
    )
    values = {
        "changes_per_s": sustained_per_s(result, arrived_s=meter.last_s),
        "median_ms": statistics.median(waits_ms),
        "p99_ms": waits_ms[len(waits_ms) * 99 // 100],
    }
    node_us, zookeeper_us, bookies_us, bench_us = (1e6 * s / result.count for s in used_s)
    lag_s = meter.last_s - result.sent_s[-1]
    wanted = f"{per_s:,} changes/s" if per_s else "as many as possible"
    # If changes were joined, the cost of each is unknown.
    capacity_per_s = CORES * result.count / sum(used_s)
    capacity = f": all cores at {capacity_per_s:,.0f} changes/s"
    return values, (
        f"{wanted}: written {result.per_s:,.0f}/s, in the log "
        f"{meter.count / (meter.last_s - result.began_s):,.0f} spans/s ({result.count:,} changes, "
        f"{meter.count:,} spans; the last {lag_s:.2f} s after its write)\n"
        f"  CPU per change: node {node_us:.0f} us, ZooKeeper {zookeeper_us:.0f} us, "
        f"bookies {bookies_us:.0f} us, load and follower {bench_us:.0f} us"
        f"{capacity if meter.count >= result.count else ''}\n"
        f"  other processes used {others_s / took_s:.1f} of {CORES} cores\n"
        f"  change to follower: median {values['median_ms']:.0f} ms, p99 {values['p99_ms']:.0f} ms"
    )


async def _arrived(meter: Meter, result: LoadResult) -> None:
    await wait_until(
        lambda: meter.last_id >= result.zxids[-1],
        "the last change",
        timeout_s=TIMEOUT_S,
        poll_s=POLL_S,
    )


def sustained_per_s(result: LoadResult, *, arrived_s: float) -> float:
    """Return the rate of changes until the last of them was in the log, at ``arrived_s``."""
    lag_s = arrived_s - result.sent_s[-1]
    return result.count / (result.ended_s - result.began_s + lag_s)


# --- The first mark -------------------------------------------------------------------------------


async def measure_first_mark(session: Session, ground: FeedGround, is_quick: bool) -> Record:
    """Lose a bookie again and again: without changes, and beside changes with the feed off and on,
    in turn. Times are milliseconds to the first mark, by ZooKeeper's clock."""
    losses = 2 if is_quick else LOSSES
    found: dict[str, list[float]] = {"no changes": [], "feed off": [], "feed on": []}
    began_s, machine_s = time.monotonic(), cpu_of_machine()
    for _ in range(2):
        for kind, waits_ms in found.items():
            await (ground.enable_feed() if kind == "feed on" else ground.disable_feed())
            await asyncio.sleep(3 * SETTLE_S)
            load = ground.load(BESIDE_PER_S)
            if kind != "no changes":
                load.start()
            try:
                await asyncio.sleep(3 * SETTLE_S)
                waits_ms += [await lose_victim(ground) for _ in range(losses // 2)]
            finally:
                if kind != "no changes":
                    await asyncio.to_thread(load.stop)
            session.say(f"{kind}: {waits_ms} ms")
    busy_cores = (cpu_of_machine() - machine_s) / (time.monotonic() - began_s)
    waits = "; ".join(
        f"{kind}: median {statistics.median(each):.0f} ms, most {max(each):.0f} ms"
        for kind, each in found.items()
    )
    return Record(
        name=FIRST_MARK,
        values={"first_mark_ms": statistics.median(found["feed on"])},
        text=f"first mark after a loss, beside {BESIDE_PER_S:,} changes/s: {waits}\n"
        f"  {busy_cores:.1f} of {CORES} cores were busy",
    )


async def lose_victim(ground: FeedGround) -> float:
    """Lose the victim until all its ledgers are marked, and restore it. Return the milliseconds
    until the first mark."""
    store = ground.store
    _, stat = await store.multi(
        [Delete(path=_registration(VICTIM)), SetData(path=CLOCK, data=b"", version=ANY_VERSION)]
    )
    assert isinstance(stat, Stat), stat

    async def is_marked() -> bool:
        return len(await marked_ledger_ids(store, ground.paths)) == len(VICTIM_LEDGER_IDS)

    async def is_noticed() -> bool:
        return (await read_losses(store, ground.paths))[VICTIM].ended_ms is not None

    await wait_until(is_marked, "all marks", timeout_s=TIMEOUT_S, poll_s=MARK_POLL_S)
    marks = await asyncio.gather(*(store.get(ground.paths.mark(i)) for i in VICTIM_LEDGER_IDS))
    await store.create(_registration(VICTIM), is_ephemeral=True)
    # A leader that has not noticed the return believes that the ledgers are still marked.
    await wait_until(is_noticed, "the bookie's return", timeout_s=TIMEOUT_S, poll_s=MARK_POLL_S)
    await ZnodeCluster(store).delete_marks()
    await asyncio.sleep(SETTLE_S)
    return min(each.ctime_ms for _, each in marks) - stat.mtime_ms


# --- The report -----------------------------------------------------------------------------------

RECORDED = ("take-over", "behind", "receipts", "catch-up", "fsck")
"""The parts that are no longer measured."""
OTHERS_SHARE = "others_share"
"""A value of every record: the share of all cores that other programs used."""
QUIET_SHARE_MAX = 0.1
"""More than this, and the report says that the machine was busy."""
CHANGES = "changes a second into the log, as many as possible"
FIRST = "first mark after a loss, beside 5,000 changes/s"
TAKEOVER = "take-over at 1,000,000 ledgers, 10,000 changes, beyond the scan"
KNOWN = "client 1,000,000 changes behind knows all of them"
STORED = "stored receipts of one-second checkpoints, completed in random order"
CATCH_UP = "catch-up of 100,000 changes, times the rate of etcd's watch"
FSCK = "fsck --changed, 1,000 of 1,000,000 ledgers, times sooner than all"
PREAMBLE = """\
# The change feed

Everything runs on one machine with {cores} cores: ZooKeeper, bookies, a node, the load and the
clients. The figures depend on the machine. `bench/README.md` says what each figure means.

Recorded results, which were measured once and are not measured again: {recorded}.
The peer in catch-up was etcd, in the same run.
"""


def of_part(part: str, name: str) -> Callable[[Records], Summary]:
    return lambda records: named(name, "").summary(records.find(part))


GOALS = [
    Goal(
        title,
        of_part(part, name),
        must,
        aim,
        at_least=aim > must,
        unit=unit,
        digits=digits,
    )
    for part, name, must, aim, unit, digits, title in (
        (LOG, "changes_per_s", 10_000, 30_000, "", 0, CHANGES),
        (LOG, "median_ms", 150, 60, " ms", 0, "change to follower at 1,000 changes/s, median"),
        (LOG, "p99_ms", 500, 200, " ms", 0, "change to follower at 1,000 changes/s, p99"),
        (FIRST_MARK, "first_mark_ms", 100, 30, " ms", 0, FIRST),
        ("take-over", "takeover_s", 10, 3, " s", 1, TAKEOVER),
        ("behind", "known_s", 30, 10, " s", 1, KNOWN),
        ("behind", "memory_mb", 250, 100, " MB", 0, "its memory meanwhile"),
        ("receipts", "stored_kb", 1_000, 10, " KB", 1, STORED),
        ("catch-up", "times_the_watch", 0.5, 1, "", 1, CATCH_UP),
        ("fsck", "times_sooner", 10, 50, "", 0, FSCK),
    )
]


def report(records: Records) -> str:
    preamble = PREAMBLE.format(cores=CORES, recorded=", ".join(RECORDED))
    head = [preamble, *failures_section(records), goals_section(GOALS, records)]
    return "\n".join([*head, *parts_sections(records, (LOG, FIRST_MARK, *RECORDED))])


def parts_sections(records: Records, parts: Iterable[str]) -> Iterator[str]:
    """Yield the section of each part that has a result."""
    for part in parts:
        for record in records.find(part):
            others = record.values[OTHERS_SHARE]
            busy = f"\n\nThe machine was busy: others used {others:.0%} of the cores."
            kind = " (recorded)" if part in RECORDED else ""
            busy_or_not = busy if others > QUIET_SHARE_MAX else ""
            yield f"## {part}{kind}\n\n{record.text}{busy_or_not}\n"


if __name__ == "__main__":
    main()
