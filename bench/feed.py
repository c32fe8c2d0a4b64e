"""How fast changes get into the change feed, how soon followers see them, and what marks wait.

Everything runs on this machine: ZooKeeper, three bookies, a node of ours, a load that changes
metadata (``feed_load``), and a follower of the log in this process. Each figure is a function that
returns a dataclass; ``python -m bench.feed FIGURE...`` prints them:

- ``encode``: the codec alone, without a cluster.
- ``load``: the load and ZooKeeper, without a node: the most that the machine allows.
- ``log``: changes per second into the log, their latency, and the CPU of the node.
- ``first_mark``: time from the loss of a bookie to the first mark while metadata changes, with the
  feed off and on.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from auditor.mark_reasons import read_losses
from bench.contenders import OURS, PLAIN
from bench.feed_load import LoadResult, MetadataLoad, changing_metadata, prepare_writes
from bench.profile import by_function, by_group, load_samples
from bench.usage import cpu_of, cpu_of_machine
from checkpoints.chain import FeedChain, order_change, read_chain
from checkpoints.codec import CheckpointDecoder, cut_checkpoints, encode_checkpoint
from checkpoints.collector import ChangeCollector
from checkpoints.log import CheckpointLog
from checkpoints.model import Checkpoint
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.client import open_bookies
from ledgers.clock import SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.registration import READ_ONLY
from ledgers.store import ANY_VERSION, Delete, SetData, Stat
from ledgers.zookeeper.store import ZooKeeperStore
from replication import znodes
from replication.marks import marked_ledger_ids
from replication.znodes import Audit, ClusterPaths
from tests.znode_cluster import ROOT, ZnodeCluster, closed

ENCODED = 200_000
LEDGERS = 20_000
FIRST_ID = 10_000_000
JVM_FLAGS = ("-XX:TieredStopAtLevel=4", "-XX:ReservedCodeCacheSize=240m")
"""The compiler that an operator would give."""
BOOKIE_JVM_FLAGS = (*JVM_FLAGS, "-Xmx256m", "-XX:MaxDirectMemorySize=256m")
ZOOKEEPER_JVM_FLAGS = (*JVM_FLAGS, "-Xmx512m")
SESSION_TIMEOUT_S = 30.0
WARM_UP_S = 5.0
"""Time for the compilers of ZooKeeper and the bookies, under the load that is measured then."""
DURATION_S = 10.0
START_TIMEOUT_S = 120.0
CATCH_UP_TIMEOUT_S = 120.0
POLL_S = 0.01
VICTIM = BookieId("127.1.0.1:3181")
"""A bookie that is only a registration. It is read-only, so that the feed is not written to it."""
VICTIM_LEDGERS = 200
VICTIM_LEDGER_IDS = range(20_000_000, 20_000_000 + VICTIM_LEDGERS)
CLOCK = "/bench-clock"
"""Written together with the loss, to learn its time by ZooKeeper's clock."""
MARK_POLL_S = 0.05
RATES_PER_S = (1_000, 5_000, 10_000, 15_000, 20_000, 0)
PROFILE_PER_S, PROFILE_ROWS = 5_000, 60
SETTLE_S = 1.0


# --- The codec ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeFigures:
    """Changes per second of the steps that need no cluster."""

    collected_per_s: float
    encoded_per_s: float
    decoded_per_s: float
    bytes_per_change: float

    def text(self) -> str:
        return (
            f"collect: {self.collected_per_s:,.0f} changes/s; cut and encode: "
            f"{self.encoded_per_s:,.0f}/s; decode: {self.decoded_per_s:,.0f}/s; "
            f"{self.bytes_per_change:.1f} bytes per change"
        )


def measure_encode(count: int = ENCODED) -> EncodeFigures:
    """Measure collecting, cutting and encoding, and decoding."""
    collector = ChangeCollector()
    data = random.Random(1).randbytes(300)
    begun_s = time.perf_counter()
    for number in range(count):
        stat = Stat(version=1, mzxid=number + 1)
        collector.ledger_read(number, before=0, stat=stat, data=data)
    collected_s = time.perf_counter()
    collector.cut()
    collector.seal()
    spans = collector.spans(list(collector.sealed_runs()))
    cut = cut_checkpoints(spans, previous_id=0, last_id=collector.target, time_ms=1)
    entries = [entry for checkpoint in cut for entry in encode_checkpoint(checkpoint)]
    encoded_s = time.perf_counter()
    decoder = CheckpointDecoder()
    decoded = sum(len(c.spans) for e in entries if (c := decoder.decode(e)) is not None)
    done_s = time.perf_counter()
    assert decoded == count
    return EncodeFigures(
        collected_per_s=count / (collected_s - begun_s),
        encoded_per_s=count / (encoded_s - collected_s),
        decoded_per_s=count / (done_s - encoded_s),
        bytes_per_change=sum(map(len, entries)) / count,
    )


# --- The ground -----------------------------------------------------------------------------------


@dataclass(slots=True)
class FeedGround:
    """A cluster with ledgers that exist only as metadata, and perhaps a node of ours."""

    cluster: LocalCluster
    store: ZooKeeperStore
    writes: Sequence[bytes]
    """Prepared changes of all ledgers."""
    node: Child | None = None
    clock: SystemClock = field(default_factory=SystemClock)

    @property
    def paths(self) -> ClusterPaths:
        return ClusterPaths.below(ROOT)

    @property
    def uri(self) -> MetadataUri:
        return MetadataUri.parse(self.cluster.metadata_service_uri)

    def load(self, per_s: int = 0) -> MetadataLoad:
        return MetadataLoad(self.cluster.zookeeper_address, self.writes, per_s=per_s)

    async def enable_feed(self) -> None:
        """Enable the feed, if it is not."""
        stored = await read_chain(self.store, self.paths)
        if stored.value is not None and stored.value.is_enabled:
            return
        await self._order(
            lambda chain: chain.enabled(now_ms=self.clock.wall_ms(), by="bench", retention_s=3_600)
        )

    async def disable_feed(self) -> None:
        await self._order(lambda chain: chain.disabled(now_ms=self.clock.wall_ms(), by="bench"))

    async def _order(self, change: Callable[[FeedChain], FeedChain]) -> None:
        await order_change(self.store, self.paths, change)


@asynccontextmanager
async def open_feed_ground(
    *, has_node: bool = True, samples: Path | None = None, ledger_count: int = LEDGERS
) -> AsyncIterator[FeedGround]:
    """Start a cluster and a node that leads, and create the ledgers.

    ``samples``: a file for the samples of the node's threads (``bench.sampled``), which is written
    at the end.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-feed-") as folder,
        LocalCluster.start(
            Path(folder),
            bookies=3,
            bookie_jvm_flags=BOOKIE_JVM_FLAGS,
            zookeeper_jvm_flags=ZOOKEEPER_JVM_FLAGS,
        ) as cluster,
    ):
        store = await ZooKeeperStore.open(
            cluster.zookeeper_address, session_timeout_s=SESSION_TIMEOUT_S
        )
        try:
            ids = range(FIRST_ID, FIRST_ID + ledger_count)
            manager = ZnodeCluster(store).manager
            ground = FeedGround(cluster, store, prepare_writes(manager, ids, cluster.bookies))
            await ZnodeCluster(store).create_ledgers(
                (i, changing_metadata(i, cluster.bookies)[0]) for i in ids
            )
            await _call_checked(ground)
            if has_node:
                async with _running_node(ground, samples):
                    yield ground
            else:
                yield ground
        finally:
            await store.close()


async def _call_checked(ground: FeedGround) -> None:
    """Record that all ledgers were just checked: the bookies have no entries of them."""
    path = ground.paths.audit_time(Audit.ALL_LEDGERS)
    data = znodes.audit_time_to_bytes(ground.clock.wall_ms())
    await ground.store.create(path, data, with_parents=True)


@asynccontextmanager
async def _running_node(ground: FeedGround, samples: Path | None) -> AsyncIterator[None]:
    contender = replace(
        OURS,
        settings={"replication.enabled": "false", "node.nice": "0", "log.format": "json"},
    )
    before = PLAIN if samples is None else ("-m", "bench.sampled", str(samples))
    ground.node = child = contender.start(ground.cluster, before=before)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while '"ledger_map.built"' not in child.log.read_text():
            if not child.is_running or time.monotonic() > deadline_s:
                raise UnavailableError(f"the node does not lead:\n{child.log_tail()}")
            await asyncio.sleep(0.1)
        yield
    finally:
        ground.node = None
        child.terminate()
        if not child.wait(timeout_s=15):
            child.kill()


# --- The load alone -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The limits of the machine without a node. CPU in microseconds per change."""

    written_per_s: float
    load_us: float
    zookeeper_us: float

    def text(self) -> str:
        return (
            f"the load and ZooKeeper alone: {self.written_per_s:,.0f} changes/s; CPU per change: "
            f"load {self.load_us:.1f} us, ZooKeeper {self.zookeeper_us:.1f} us"
        )


async def measure_load(ground: FeedGround, *, duration_s: float = DURATION_S) -> LoadFigures:
    """Measure the load without a node."""
    assert ground.node is None
    load = ground.load()
    await load.run(WARM_UP_S)
    zookeeper_s = cpu_of([ground.cluster.zookeeper_pid]).total_s
    load_s = time.process_time()
    result = await load.run(duration_s)
    load_s = time.process_time() - load_s
    zookeeper_s = cpu_of([ground.cluster.zookeeper_pid]).total_s - zookeeper_s
    return LoadFigures(
        written_per_s=result.per_s,
        load_us=1e6 * load_s / result.count,
        zookeeper_us=1e6 * zookeeper_s / result.count,
    )


# --- The log --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFigures:
    """How changes get into the log.

    ``wanted_per_s``: rate of the load; 0: as many as possible. ``published_per_s``: spans in the
    log until the last change was in it. ``lag_s``: from the last write until then. CPU in
    microseconds per change. Latency: from the request of a write to its arrival at the follower.
    """

    wanted_per_s: int
    written_per_s: float
    published_per_s: float
    change_count: int
    span_count: int
    lag_s: float
    node_us: float
    zookeeper_us: float
    bookies_us: float
    bench_us: float
    """The load and the follower."""
    others_cores: float
    """Cores that processes which have nothing to do with the bench used meanwhile."""
    median_ms: float
    p99_ms: float

    @property
    def capacity_per_s(self) -> float | None:
        """Changes per second at which all this takes the whole machine, if nothing else runs; None
        if changes were joined, so that their cost is unknown."""
        if self.span_count < self.change_count:
            return None
        used_us = self.node_us + self.zookeeper_us + self.bookies_us + self.bench_us
        return 1e6 * (os.cpu_count() or 1) / used_us

    def text(self) -> str:
        wanted = f"{self.wanted_per_s:,} changes/s" if self.wanted_per_s else "as many as possible"
        limit_per_s = self.capacity_per_s
        capacity = "" if limit_per_s is None else f": all cores at {limit_per_s:,.0f} changes/s"
        return (
            f"{wanted}: written {self.written_per_s:,.0f}/s, in the log "
            f"{self.published_per_s:,.0f} spans/s ({self.change_count:,} changes, "
            f"{self.span_count:,} spans; the last {self.lag_s:.2f} s after its write)\n"
            f"  CPU per change: node {self.node_us:.0f} us, ZooKeeper {self.zookeeper_us:.0f} us, "
            f"bookies {self.bookies_us:.0f} us, load and follower {self.bench_us:.0f} us"
            f"{capacity}\n"
            f"  other processes used {self.others_cores:.1f} of {os.cpu_count()} cores\n"
            f"  change to follower: median {self.median_ms:.0f} ms, p99 {self.p99_ms:.0f} ms"
        )


class Meter:
    """A listener that notes when each version arrives."""

    def __init__(self) -> None:
        self.count = 0
        self.last_id = 0
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
    meter = Meter()
    store = await ZooKeeperStore.open(
        ground.cluster.zookeeper_address, session_timeout_s=SESSION_TIMEOUT_S
    )
    try:
        async with open_bookies(reads_in_flight_max=64) as bookies:
            log = CheckpointLog(
                store=store,
                paths=ground.paths,
                manager=await LedgerManager.open(store, ground.uri),
                bookies=bookies,
                clock=ground.clock,
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


async def measure_log(
    ground: FeedGround, *, per_s: int = 0, duration_s: float = DURATION_S
) -> LogFigures:
    """Measure a load at this rate; 0: as many as possible. Enables the feed."""
    assert ground.node is not None
    node, zookeeper = ground.node.pid, ground.cluster.zookeeper_pid
    bookies = [ground.cluster.pid(bookie) for bookie in ground.cluster.bookies]
    async with following(ground) as meter:
        await ground.enable_feed()
        load = ground.load(per_s)
        warm = await load.run(WARM_UP_S)
        await _wait(lambda: meter.last_id >= warm.zxids[-1], "the changes of the warm-up")
        await asyncio.sleep(SETTLE_S)
        meter.count = 0
        meter.arrived_s.clear()
        parts = ([node], [zookeeper], bookies, [os.getpid()])
        before, machine = [cpu_of(pids).total_s for pids in parts], cpu_of_machine().total_s
        result = await load.run(duration_s)
        await _wait(lambda: meter.last_id >= result.zxids[-1], "the last change")
        took_s = time.monotonic() - result.began_s
        after = [cpu_of(pids).total_s for pids in parts]
        used_s = [now - then for now, then in zip(after, before, strict=True)]
        others_s = max(0.0, cpu_of_machine().total_s - machine - sum(used_s))
        node_us, zookeeper_us, bookies_us, bench_us = (1e6 * s / result.count for s in used_s)
        waits_ms = _waits_ms(result, meter)
        return LogFigures(
            wanted_per_s=per_s,
            written_per_s=result.per_s,
            published_per_s=meter.count / (meter.last_s - result.began_s),
            change_count=result.count,
            span_count=meter.count,
            lag_s=meter.last_s - result.sent_s[-1],
            node_us=node_us,
            zookeeper_us=zookeeper_us,
            bookies_us=bookies_us,
            bench_us=bench_us,
            others_cores=others_s / took_s,
            median_ms=statistics.median(waits_ms),
            p99_ms=waits_ms[len(waits_ms) * 99 // 100],
        )


def _waits_ms(result: LoadResult, meter: Meter) -> list[float]:
    """Return the waits of the versions that arrived, ascending. The others were superseded."""
    return sorted(
        1000 * (meter.arrived_s[zxid] - sent_s)
        for zxid, sent_s in zip(result.zxids, result.sent_s, strict=True)
        if zxid in meter.arrived_s
    )


async def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{what} did not arrive")
        await asyncio.sleep(POLL_S)


# --- The first mark -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstMarkFigures:
    """Milliseconds from the loss of a bookie to the first mark, by ZooKeeper's clock, of each loss.

    ``quiet_ms``: no changes, no feed. ``off_ms``, ``on_ms``: beside changes, with the feed off and
    on, in turn.
    """

    per_s: int
    quiet_ms: Sequence[float]
    off_ms: Sequence[float]
    on_ms: Sequence[float]
    busy_cores: float
    """Cores that were busy meanwhile, with everything on the machine."""

    def text(self) -> str:
        kinds = (("no changes", self.quiet_ms), ("feed off", self.off_ms), ("feed on", self.on_ms))
        waits = "; ".join(
            f"{kind}: median {statistics.median(each):.0f} ms, most {max(each):.0f} ms"
            for kind, each in kinds
        )
        return (
            f"first mark after a loss, beside {self.per_s:,} changes/s: {waits}\n"
            f"  {self.busy_cores:.1f} of {os.cpu_count()} cores were busy"
        )


async def measure_first_mark(
    ground: FeedGround, *, per_s: int = 5_000, losses: int = 10
) -> FirstMarkFigures:
    """Lose a bookie again and again, without changes, and beside changes with the feed off and
    on."""
    found: dict[str, list[float]] = {"quiet": [], "off": [], "on": []}
    await _create_victim(ground)
    begun_s, machine_s = time.monotonic(), cpu_of_machine().total_s
    for _ in range(2):
        for kind in ("quiet", "off", "on"):
            await (ground.enable_feed() if kind == "on" else ground.disable_feed())
            await asyncio.sleep(3 * SETTLE_S)
            load = ground.load(per_s)
            if kind != "quiet":
                load.start()
            try:
                await asyncio.sleep(3 * SETTLE_S)
                for _ in range(losses // 2):
                    found[kind].append(await _lose_victim(ground))
            finally:
                if kind != "quiet":
                    await asyncio.to_thread(load.stop)
    return FirstMarkFigures(
        per_s=per_s,
        quiet_ms=found["quiet"],
        off_ms=found["off"],
        on_ms=found["on"],
        busy_cores=(cpu_of_machine().total_s - machine_s) / (time.monotonic() - begun_s),
    )


_REGISTRATION = f"{ROOT}/available/{READ_ONLY}/{VICTIM}"


async def _create_victim(ground: FeedGround) -> None:
    """Create the victim and the ledgers that name it beside two real bookies."""
    cluster = ZnodeCluster(ground.store)
    await ground.store.create(f"{ROOT}/cookies/{VICTIM}", with_parents=True)
    await ground.store.create(_REGISTRATION, is_ephemeral=True, with_parents=True)
    await ground.store.create(CLOCK)
    await asyncio.sleep(SETTLE_S)  # else its ledgers may be known before its registration
    await cluster.create_ledgers(
        (i, closed(VICTIM, *ground.cluster.bookies[:2])) for i in VICTIM_LEDGER_IDS
    )


async def _lose_victim(ground: FeedGround) -> float:
    """Lose the victim until all its ledgers are marked, and restore it. Return the milliseconds
    until the first mark."""
    store = ground.store
    _, stat = await store.multi(
        [Delete(path=_REGISTRATION), SetData(path=CLOCK, data=b"", version=ANY_VERSION)]
    )
    assert isinstance(stat, Stat), stat
    deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
    while len(await marked_ledger_ids(store, ground.paths)) < VICTIM_LEDGERS:
        if time.monotonic() > deadline_s:
            raise UnavailableError("the ledgers of the lost bookie are not marked")
        await asyncio.sleep(MARK_POLL_S)
    marks = await asyncio.gather(*(store.get(ground.paths.mark(i)) for i in VICTIM_LEDGER_IDS))
    await store.create(_REGISTRATION, is_ephemeral=True)
    # A leader that has not noticed the return believes that the ledgers are still marked.
    while (await read_losses(store, ground.paths))[VICTIM].ended_ms is None:
        if time.monotonic() > deadline_s:
            raise UnavailableError("the leader does not notice the return of the bookie")
        await asyncio.sleep(MARK_POLL_S)
    await ZnodeCluster(store).delete_marks()
    await asyncio.sleep(SETTLE_S)
    return min(each.ctime_ms for _, each in marks) - stat.mtime_ms


# --- The command ----------------------------------------------------------------------------------


async def show_encode() -> None:
    click.echo(measure_encode().text())


async def show_load() -> None:
    async with open_feed_ground(has_node=False) as ground:
        click.echo((await measure_load(ground)).text())


async def show_log() -> None:
    async with open_feed_ground() as ground:
        for per_s in RATES_PER_S:
            click.echo((await measure_log(ground, per_s=per_s)).text())


async def show_profile() -> None:
    """Print where the CPU of the node goes at a steady rate."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        async with open_feed_ground(samples=path) as ground:
            begun_s = time.monotonic() + WARM_UP_S + 2 * SETTLE_S
            figures = await measure_log(ground, per_s=PROFILE_PER_S)
        click.echo(figures.text())
        samples = load_samples(path, begin_s=begun_s, end_s=math.inf)
        for title, parts in (("group", by_group(samples)), ("function", by_function(samples))):
            click.echo(f"CPU by {title}:")
            ranked = sorted(parts.items(), key=lambda part: -part[1])[:PROFILE_ROWS]
            for name, used_s in ranked:
                click.echo(f"  {1e6 * used_s / figures.change_count:6.2f} us  {name}")


async def show_first_mark() -> None:
    async with open_feed_ground() as ground:
        click.echo((await measure_first_mark(ground)).text())


FIGURES: dict[str, Callable[[], Coroutine[None, None, None]]] = {
    "encode": show_encode,
    "load": show_load,
    "log": show_log,
    "first_mark": show_first_mark,
    "profile": show_profile,
}


@click.command()
@click.argument("figures", nargs=-1, type=click.Choice(list(FIGURES)))
def main(figures: Sequence[str]) -> None:
    """Measure the change feed. Without FIGURES: all of them except the profile."""
    for name in figures or [name for name in FIGURES if name != "profile"]:
        asyncio.run(FIGURES[name]())


if __name__ == "__main__":
    main()
