"""A leader under random faults: at the end every ledger that lacks copies has its mark.

Bookies are lost, return, and are reformatted. Operators set the switch, holds, windows and the
delay. Ledgers are created and deleted, leaders are cut off and replaced, and replies are lost. The
worker here makes no mistakes: it reads a marked ledger, copies what is missing, and deletes the
mark at the version that it read. So the leader forgot every ledger that should have a mark at the
end and has none.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from auditor import marker, underreplication
from auditor.absence import Outages
from auditor.settings import AuditorSettings, HoldSettings
from ledgers.errors import (
    ConflictError,
    LeadershipLostError,
    NoNodeError,
    NoSuchLedgerError,
    SessionLostError,
)
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.store import Operation
from replication import znodes
from replication.orders import (
    HoldOrder,
    MaintenanceWindow,
    OrderStore,
    hold_znode,
    maintenance_znode,
)
from tests.auditor.auditing import Leader, auditing
from tests.auditor.scenes import set_delay
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import BOOKIES
from tests.replication.nodes import PATHS, ROOT
from tests.virtual_time import VirtualTimeLoop

SEED_COUNT = 20
LEDGER_COUNT = 40
EVENT_COUNT = 60
SETTLED_S = 10.0
"""After so long the first leader knows all bookies."""
QUIET_S = 120.0
ALIVE_MIN = 3
RETURN_S = 5.0
"""After an outage of the leader's connection."""
INSTANT = "instant"
"""Tasks of this name wait for no network."""


class TickingLoop(VirtualTimeLoop):
    """A loop whose clock moves a little at each reading. Otherwise a wait shorter than the
    resolution of asyncio's timers would never end."""

    def time(self) -> float:
        self.now_s += 1e-9
        return super().time()


class Storm:
    """The true state of the cluster, and the random faults."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.copies: set[tuple[int, BookieId]] = set()
        self.leader: Leader | None = None
        self.ledger_count = 0
        self.is_over = False
        self.slow_s = rng.choice([0.0, 0.05, 0.3, 0.6])
        self.log: list[str] = []
        self.faulty = 0.0
        self.forgotten: list[tuple[int, BookieId]] = []
        """In the end: ledgers and the bookies whose copies they miss."""
        cluster.tree.latency = self._latency
        cluster.tree.faults = self._fault

    async def _latency(self) -> None:
        task = asyncio.current_task()
        if task is not None and task.get_name() == INSTANT:
            return
        await asyncio.sleep(self.rng.uniform(0, self.slow_s) if self.slow_s else 0)

    def _fault(self, store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        if self.is_over or self.leader is None or store is not self.leader.store:
            return None
        if self.rng.random() < self.faulty:
            return self.rng.choice([Fault.LOST_REPLY, Fault.LOST_REQUEST])
        return None

    def say(self, what: str) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():9.3f} {what}")

    # --- Bookies ----------------------------------------------------------------------------------

    @property
    def alive(self) -> list[BookieId]:
        return [b for b in BOOKIES if not self.cluster.bookie(b).is_down]

    @property
    def absent(self) -> list[BookieId]:
        return [b for b in BOOKIES if self.cluster.bookie(b).is_down]

    def life(self, bookie: BookieId) -> int:
        node = self.cluster.tree.nodes.find(f"{ROOT}/available/{bookie}")
        return 0 if node is None else node.stat.czxid

    async def kill(self) -> None:
        if len(self.alive) > ALIVE_MIN:
            bookie = self.rng.choice(self.alive)
            self.say(f"kill {bookie}")
            await self.cluster.kill(bookie)

    async def revive(self) -> None:
        if self.absent:
            bookie = self.rng.choice(self.absent)
            self.say(f"revive {bookie}")
            await self.cluster.revive(bookie)

    async def wipe(self) -> None:
        if self.absent:
            bookie = self.rng.choice(self.absent)
            self.say(f"wipe {bookie}")
            await self.cluster.wipe(bookie)
            self.copies = {(i, b) for i, b in self.copies if b != bookie}
            if self.rng.random() < 0.8:
                self.say(f"revive {bookie}")
                await self.cluster.revive(bookie)

    async def flap(self) -> None:
        """Let the bookie return, perhaps reformatted, and disappear again soon."""
        if not self.absent:
            return
        bookie = self.rng.choice(self.absent)
        if self.rng.random() < 0.5:
            self.say(f"wipe {bookie}")
            await self.cluster.wipe(bookie)
            self.copies = {(i, b) for i, b in self.copies if b != bookie}
        self.say(f"flap {bookie} up")
        await self.cluster.revive(bookie)
        await asyncio.sleep(self.rng.choice([0.0, 0.2, 1, 3]))
        if bookie in self.alive and len(self.alive) > ALIVE_MIN:
            self.say(f"flap {bookie} down")
            await self.cluster.kill(bookie)

    # --- Ledgers ----------------------------------------------------------------------------------

    async def create(self) -> None:
        ensemble = self.rng.sample(self.alive, 3)
        ledger_id, self.ledger_count = self.ledger_count, self.ledger_count + 1
        metadata = LedgerMetadata(
            ensemble_size=3,
            write_quorum=2,
            ack_quorum=1,
            state=LedgerState.CLOSED,
            last_entry_id=9,
            length=100,
            segments=(Segment(first_entry_id=0, ensemble=tuple(ensemble)),),
        )
        self.copies |= {(ledger_id, b) for b in ensemble}
        await self.cluster.manager.create(ledger_id, metadata)
        self.say(f"create {ledger_id} {ensemble}")

    async def delete(self) -> None:
        ledger_id = self.rng.randrange(self.ledger_count)
        with suppress(NoSuchLedgerError):
            await self.cluster.manager.delete(ledger_id, version=-1)
            self.say(f"delete {ledger_id}")

    # --- The leader -------------------------------------------------------------------------------

    async def replace(self) -> None:
        if self.leader is not None:
            self.say("expire leader")
            self.cluster.tree.expire(self.leader.store)

    async def suspend(self) -> None:
        if (leader := self.leader) is not None:
            self.say("suspend leader")
            self.cluster.tree.suspend(leader.store)
            await asyncio.sleep(self.rng.choice([0.1, 1, 4]))
            self.say("resume leader")
            if leader is self.leader:
                self.cluster.tree.resume(leader.store)

    # --- Orders -----------------------------------------------------------------------------------

    async def switch(self) -> None:
        path = PATHS.disable
        if await self.cluster.store.exists(path) is None:
            await self.cluster.store.create(path)
            self.say("switch on")
        else:
            await self.cluster.store.delete(path)
            self.say("switch off")

    async def hold(self) -> None:
        path = hold_znode(PATHS).path
        if await self.cluster.store.exists(path) is None:
            hold = HoldOrder(since_ms=1, until_ms=None, is_by_operator=True)
            await self.cluster.store.create(path, hold.to_json(), with_parents=True)
            self.say("hold")
        else:
            await self.cluster.store.delete(path)
            self.say("hold ends")

    async def window(self) -> None:
        bookie = self.rng.choice(BOOKIES)
        order_store, znode = OrderStore(self.cluster.store, PATHS), maintenance_znode(PATHS, bookie)
        stored = await order_store.stored(znode)
        if stored is None or self.rng.random() < 0.5:
            now_ms = self.cluster.clock.wall_ms()
            window = MaintenanceWindow(
                since_ms=now_ms, until_ms=now_ms + self.rng.choice([500, 3000, 10000])
            )
            await order_store.give(znode, window, over=stored)
            self.say(f"window {bookie}")
        else:
            with suppress(NoNodeError):
                await self.cluster.store.delete(znode.path)
            self.say(f"window ends {bookie}")

    async def delay(self) -> None:
        delay_s = self.rng.choice([0, 0, 1, 5])
        await set_delay(self.cluster, delay_s)
        self.say(f"delay {delay_s}")

    async def faults(self) -> None:
        self.faulty = self.rng.choice([0.0, 0.02, 0.2])
        self.say(f"faults {self.faulty}")

    # --- All of it --------------------------------------------------------------------------------

    async def blow(self) -> None:
        happenings: list[Callable[[], Awaitable[None]]] = [
            self.kill,
            self.kill,
            self.kill,
            self.revive,
            self.revive,
            self.wipe,
            self.wipe,
            self.flap,
            self.flap,
            self.create,
            self.create,
            self.delete,
            self.replace,
            self.suspend,
            self.switch,
            self.hold,
            self.window,
            self.delay,
            self.faults,
        ]
        await asyncio.sleep(SETTLED_S)
        for _ in range(LEDGER_COUNT):
            await self.create()
        await asyncio.sleep(SETTLED_S)
        for _ in range(EVENT_COUNT):
            await asyncio.sleep(self.rng.choice([0, 0, 0.05, 0.3, 1, 3]))
            await self.rng.choice(happenings)()
        self.is_over = True
        self.say("over")
        with suppress(NoNodeError):
            await self.cluster.store.delete(PATHS.disable)
        with suppress(NoNodeError):
            await self.cluster.store.delete(hold_znode(PATHS).path)
        for bookie in BOOKIES:
            with suppress(NoNodeError):
                await self.cluster.store.delete(maintenance_znode(PATHS, bookie).path)
        await asyncio.sleep(QUIET_S)
        self.forgotten = await self.unmarked()

    async def unmarked(self) -> list[tuple[int, BookieId]]:
        """Return the ledgers whose missing copies their marks do not name."""
        found = []
        async for ledger_ids in self.cluster.manager.ledger_ids():
            for ledger_id in ledger_ids:
                metadata = (await self.cluster.manager.read(ledger_id)).metadata
                named = await self.mark_of(ledger_id)
                for bookie in metadata.bookies:
                    is_whole = bookie in self.alive and (ledger_id, bookie) in self.copies
                    if not is_whole and bookie not in named:
                        found.append((ledger_id, bookie))
        return found

    async def mark_of(self, ledger_id: int) -> tuple[BookieId, ...]:
        try:
            data, _ = await self.cluster.store.get(PATHS.mark(ledger_id))
        except NoNodeError:
            return ()
        return znodes.parse_mark(data).replicas


class SketchedWorker:
    """A worker that makes no mistakes."""

    def __init__(self, storm: Storm) -> None:
        self.storm, self.cluster, self.rng = storm, storm.cluster, storm.rng

    async def run(self) -> None:
        while not self.storm.is_over:
            await asyncio.sleep(self.rng.choice([0.01, 0.1, 1]))
            if self.storm.is_over:
                return
            marked = await self.cluster.marked()
            if marked and await self.cluster.store.exists(PATHS.disable) is None:
                with suppress(NoNodeError, ConflictError, NoSuchLedgerError):
                    await self.repair(self.rng.choice(marked))

    async def repair(self, ledger_id: int) -> None:
        storm = self.storm
        path = PATHS.mark(ledger_id)
        stat = await self.cluster.store.exists(path)
        if stat is None:
            return
        version = stat.version
        try:
            found = await self.cluster.manager.read(ledger_id)
        except NoSuchLedgerError:
            await self.cluster.store.delete(path, version=version)
            return
        named = found.metadata.bookies
        moved: dict[BookieId, BookieId] = {}
        for bookie in sorted(named):
            if bookie in storm.alive:
                storm.copies.add((ledger_id, bookie))
            else:
                free = [b for b in storm.alive if b not in named and b not in moved.values()]
                if free and self.rng.random() >= 0.3:
                    moved[bookie] = self.rng.choice(free)
        lives = {b: storm.life(b) for b in {*named - moved.keys(), *moved.values()}}
        storm.copies |= {(ledger_id, b) for b in moved.values()}
        await asyncio.sleep(self.rng.choice([0, 0.05, 0.5]))
        if any(storm.life(b) != life for b, life in lives.items()):
            return
        if moved:
            (segment,) = found.metadata.segments
            ensemble = tuple(moved.get(b, b) for b in segment.ensemble)
            metadata = found.metadata.with_segment(Segment(first_entry_id=0, ensemble=ensemble))
            await self.cluster.manager.write(ledger_id, metadata, read_as=found)
            storm.say(f"moved {ledger_id} {moved}")
        if 0 in lives.values():
            return
        await self.cluster.store.delete(path, version=version)
        storm.say(f"unmarked {ledger_id} v{version}")


async def lead(storm: Storm) -> None:
    """Run one leader after the other, each with its own session, as the daemon does."""
    count = 0
    outages = Outages(storm.cluster.clock, return_s=RETURN_S)
    while True:
        count += 1
        try:
            async with auditing(
                storm.cluster,
                f"node-{count}",
                settings=AuditorSettings(),
                hold=HoldSettings(enabled=False),
                outages=outages,
            ) as leader:
                storm.say(f"LEADS {count}")
                storm.leader = leader
                await leader.store.wait_lost()
        except* (SessionLostError, LeadershipLostError):
            pass
        storm.leader = None
        outages.begin()
        await asyncio.sleep(storm.rng.choice([0, 1, 3]))


async def run_storm(seed: int) -> Storm:
    """Run the storm of a seed and return it when it is over."""
    storm = Storm(await Cluster.start(), random.Random(seed))
    leading = asyncio.create_task(lead(storm))
    workers = [asyncio.create_task(SketchedWorker(storm).run(), name=INSTANT) for _ in range(2)]
    await asyncio.create_task(storm.blow(), name=INSTANT)
    leading.cancel()
    for result in await asyncio.gather(leading, *workers, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return storm


@pytest.mark.parametrize("seed", range(SEED_COUNT))
def test_every_ledger_that_lacks_copies_has_its_mark(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(marker, "MARKS_PER_MULTI", rng.choice([1, 2, 25]))
    monkeypatch.setattr(marker, "MULTIS_AT_ONCE", rng.choice([1, 2]))
    monkeypatch.setattr(underreplication, "SLICE", rng.choice([2, 500]))

    with asyncio.Runner(loop_factory=TickingLoop) as runner:
        storm = runner.run(run_storm(seed))

    assert not storm.forgotten, (seed, *storm.log)
