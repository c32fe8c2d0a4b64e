"""The auditor's soak: ``python -m tests.soak.audit``.

Three of our nodes are candidates on a real ZooKeeper. Bookies and ledgers are znodes that appear,
change and disappear all the time, and ZooKeeper is killed and restarted. During the first sixth,
leaders are killed too; in the last two thirds, their memory is measured. In the end the marks must
equal those computed from scratch, and the leader must not have grown.
"""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from ledgers.errors import ConflictError, NodeExistsError, NoNodeError, UnavailableError
from ledgers.zookeeper.store import ZooKeeperStore
from tests.soak.chaos import Chaos
from tests.soak.leaders import Leaders, growth_bytes_per_s
from tests.soak.verdict import Verdict, judge
from tests.soak.worker import SoakWorker
from tests.znode_cluster import LAYOUT, ROOT, ZnodeCluster
from tests.zookeeper_server import ZooKeeperServer

NODES = ("one", "two", "three")
SESSION_TIMEOUT_S = 60.0
"""Our own session timeout: the bookies' znodes must survive ZooKeeper's restarts."""
ZOOKEEPER_HEAP_MIB = 512
LEDGERS_PAUSE_S, BOOKIES_PAUSE_S, WORKER_PAUSE_S = 0.05, 1.0, 0.5
WORKED_OFF_AT_ONCE = 100
UNWORKED_S = 20.0
"""For this long before the end no mark is completed, so that marks are left to judge."""
KILLS_EVERY_S, RESTARTS_EVERY_S = 25.0, 60.0
DOWN_S = (0.0, 3.0)
PROGRESS_S = 10.0
RIGHT_WITHIN_S = 60.0
"""Time after the last event."""
GROWTH_MAX_MB = 1.0
GROWTH_SPAN_S = 600.0
"""The leader may grow by GROWTH_MAX_MB in this time."""
MISSED = (UnavailableError, NoNodeError, NodeExistsError, ConflictError)
"""Errors of a step while ZooKeeper is down, or when another step was quicker. They are ignored."""


@click.command()
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--ledgers", default=5_000, show_default=True)
@click.option("--seed", type=int, help="By default another one each time.")
def main(minutes: float, ledgers: int, seed: int | None) -> None:
    """Let bookies fail, kill leaders, restart ZooKeeper; then check that all marks are right."""
    seed = random.randrange(2**32) if seed is None else seed
    click.echo(f"seed: {seed}")
    folder = Path(tempfile.mkdtemp(prefix="soak-audit-"))
    server = ZooKeeperServer(folder, heap_mib=ZOOKEEPER_HEAP_MIB)
    server.start()
    try:
        faults = asyncio.run(_soak(server, folder, seed, minutes * 60, ledgers))
    finally:
        server.process.kill()
    if faults:
        raise click.ClickException("; ".join(faults) + f"; logs are in {folder}")
    shutil.rmtree(folder)
    click.echo("all is well")


async def _soak(
    server: ZooKeeperServer, folder: Path, seed: int, duration_s: float, ledger_count: int
) -> list[str]:
    store = await ZooKeeperStore.open(server.address, session_timeout_s=SESSION_TIMEOUT_S)
    try:
        cluster, rng = ZnodeCluster(store), random.Random(seed)
        soak = Soak(
            server=server,
            cluster=cluster,
            chaos=Chaos(cluster, rng, ledger_count),
            worker=SoakWorker(cluster, rng),
            leaders=Leaders(cluster, _uri(server), folder),
            rng=rng,
            duration_s=duration_s,
        )
        try:
            return await soak.run()
        finally:
            await soak.leaders.stop()
    finally:
        await store.close()


def _uri(server: ZooKeeperServer) -> str:
    return f"zk+{LAYOUT.name.lower()}://{server.address}{ROOT}"


@dataclass(slots=True, kw_only=True)
class Soak:
    """One run of the soak."""

    server: ZooKeeperServer
    cluster: ZnodeCluster
    chaos: Chaos
    worker: SoakWorker
    leaders: Leaders
    rng: random.Random
    duration_s: float
    restart_count: int = 0
    mark_count: int = 0
    """The number of marks at the last look."""

    async def run(self) -> list[str]:
        """Run the soak, and return its faults."""
        await self.chaos.begin()
        for name in NODES:
            self.leaders.start(name)
        began_s = time.monotonic()
        end_s = began_s + self.duration_s
        calm_s, warm_s = began_s + self.duration_s / 6, began_s + self.duration_s / 3
        async with asyncio.TaskGroup() as tasks:
            for each in (
                self._repeat(self._move_a_bookie, BOOKIES_PAUSE_S, end_s),
                self._repeat(self.chaos.touch_a_ledger, LEDGERS_PAUSE_S, end_s),
                self._repeat(self._work_off, WORKER_PAUSE_S, end_s - UNWORKED_S),
                self._repeat(self._kill_leader, KILLS_EVERY_S, calm_s),
                self._repeat(self._restart_zookeeper, RESTARTS_EVERY_S, end_s),
                self._weigh(began_s, warm_s, end_s),
            ):
                tasks.create_task(each)
        verdict = await self._settled()
        click.echo(f"{verdict.to_text()}: {self.mark_count} marks")
        faults = [] if verdict.is_right else [verdict.to_text()]
        if ended := self.leaders.ended():
            faults.append(f"ended by themselves: {', '.join(ended)}")
        return faults + await self._growth_faults()

    # --- Meanwhile --------------------------------------------------------------------------------

    async def _repeat(
        self, step: Callable[[], Awaitable[None]], pause_s: float, end_s: float
    ) -> None:
        """Repeat the step until then, with random pauses."""
        while (now_s := time.monotonic()) < end_s:
            await asyncio.sleep(min(self.rng.uniform(0, 2 * pause_s), end_s - now_s))
            with suppress(*MISSED):
                await step()

    async def _move_a_bookie(self) -> None:
        await self.chaos.move_a_bookie(now_s=time.monotonic())

    async def _work_off(self) -> None:
        await self.worker.work_off(WORKED_OFF_AT_ONCE)

    async def _kill_leader(self) -> None:
        await self.leaders.kill_leader(self.rng)

    async def _restart_zookeeper(self) -> None:
        self.server.process.kill()
        await asyncio.sleep(self.rng.uniform(*DOWN_S))
        await asyncio.to_thread(self.server.start)
        self.restart_count += 1

    async def _weigh(self, began_s: float, warm_s: float, end_s: float) -> None:
        while (now_s := time.monotonic()) < end_s:
            if now_s >= warm_s:
                self.leaders.weigh(now_s=now_s)
            with suppress(*MISSED):
                await self._say(now_s - began_s)
            await asyncio.sleep(min(PROGRESS_S, max(0, end_s - time.monotonic())))

    async def _say(self, elapsed_s: float) -> None:
        marks = await self.cluster.marks()
        self.mark_count = len(marks)
        leader = await self.leaders.leader()
        samples = self.leaders.samples.get(leader or "", [])
        weight = f", {samples[-1][1] / 1e6:.1f} MB" if samples else ""
        click.echo(
            f"[{elapsed_s:5.0f} of {self.duration_s:.0f} s] leader {leader}{weight}; "
            f"{self.leaders.kill_count} killed, {self.restart_count} restarts, "
            f"{self.chaos.loss_count} losses, {self.chaos.change_count} ledgers touched, "
            f"{len(marks)} marks, {self.worker.worked_off_count} worked off",
            err=True,
        )

    # --- In the end -------------------------------------------------------------------------------

    async def _settled(self) -> Verdict:
        """Return the verdict when the marks are right, or when it is too late for that."""
        deadline_s = time.monotonic() + RIGHT_WITHIN_S
        while True:
            await self.worker.delete_surplus()
            lost = frozenset(self.chaos.bookies) - await self.cluster.registered()
            marks, lacking = await self.cluster.marks(), await self.cluster.lacking(lost)
            verdict = judge(marks, lacking, ever_absent=self.chaos.ever_absent)
            self.mark_count = len(marks)
            if verdict.is_right or time.monotonic() > deadline_s:
                return verdict
            await asyncio.sleep(1)

    async def _growth_faults(self) -> list[str]:
        """Return the fault of a leader that grew. A run that is too short has none."""
        leader = await self.leaders.leader()
        if leader is None:
            return ["nobody leads"]
        samples = self.leaders.samples[leader]
        span_s = samples[-1][0] - samples[0][0] if samples else 0.0
        growth_mb = growth_bytes_per_s(samples) * GROWTH_SPAN_S / 1e6
        click.echo(f"the leader grew by {growth_mb:.2f} MB in 10 minutes, over {span_s / 60:.0f}")
        is_too_much = span_s >= GROWTH_SPAN_S and growth_mb >= GROWTH_MAX_MB
        return [f"the leader grows by {growth_mb:.2f} MB in 10 minutes"] if is_too_much else []


if __name__ == "__main__":
    main()
