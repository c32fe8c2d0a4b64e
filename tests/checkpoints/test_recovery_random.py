"""Random lives of a client: it never misses a change, whatever fails.

``TEST_FEED_SEEDS=1000`` runs more seeds. A failure prints its seed, and ``TEST_FEED_SEED`` runs one
seed only.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from checkpoints.model import Span, SpanFilter, ledger_id_of, ledger_key
from checkpoints.recovery import RecoveryService, RecoverySettings
from ledgers.errors import ClientFencedError, UnavailableError
from tests.checkpoints.clients import CLIENT, Client, Feed, settle
from tests.checkpoints.faulty_store import FaultyStore, StoreFault
from tests.virtual_time import run

SEED_COUNT = int(os.environ.get("TEST_FEED_SEEDS", "40"))
SEED = os.environ.get("TEST_FEED_SEED")
STEP_COUNT = 150
LEDGER_COUNT = 12


@dataclass(slots=True, kw_only=True)
class Process:
    """A process of the client. ``todo``: what it was given; ``worked``: work without a receipt."""

    client: Client
    store: FaultyStore
    stop: asyncio.Event
    todo: dict[int, int] = field(default_factory=dict)
    worked: list[tuple[int, int]] = field(default_factory=list)
    seam: int | None = None
    """The low watermark of a new client when it was first given something."""

    def collect(self) -> None:
        """Note what the listener was given."""
        self.todo |= self.client.given
        self.client.given = {}


class Life:
    """A feed, and the processes of one client, one after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.feed = Feed()
        self.fault_rate = self.rng.choice([0.0, 0.05, 0.3])
        self.wanted: SpanFilter | None = _is_wanted if self.rng.random() < 0.3 else None
        self.latest: dict[int, int] = {}
        """The latest version of each ledger that the client wants to see."""
        self.submitted: dict[int, int] = {}
        """The highest version of each ledger that any process submitted before it was fenced."""
        self.seam = 0
        """What was committed up to here is not promised: the client was new."""
        self.process: Process | None = None
        self.processes: list[Process] = []
        self.stores: list[FaultyStore] = []
        self.counts: dict[str, int] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self.tasks:
            for _ in range(STEP_COUNT):
                await self.step()
                if self.rng.random() < 0.3:
                    await settle()
                if self.rng.random() < 0.1:
                    await self.feed.clock.sleep(self.rng.choice([0.5, 10, 70]))
                self.check_receipts()
            self.fault_rate = 0
            await self.finish()
            for process in self.processes:
                process.stop.set()
            for store in self.stores:
                await store.settle_late()
            self.check_receipts()

    async def step(self) -> None:
        if self.process is None:
            await self.start()
            return
        actions: dict[Callable[[Process], Awaitable[None]], int] = {
            self.commit: 30,
            self.work: 30,
            self.submit: 25,
            self.fail: 4,
            self.retry: 2,
            self.subscribe_again: 4,
            self.die: 3,
            self.end: 2,
            self.lose_touch: 2,
        }
        (action,) = self.rng.choices(list(actions), list(actions.values()))
        self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
        await action(self.process)

    # --- What may happen --------------------------------------------------------------------------

    async def commit(self, _: Process | None = None) -> None:
        ledger_ids = self.rng.sample(range(LEDGER_COUNT), self.rng.choice([0, 1, 1, 2, 5]))
        deleted = frozenset(ledger_ids[:1] if self.rng.random() < 0.2 else ())
        previous = self.feed.versions.copy()
        next_id = self.feed.source.last_id + 1
        for version, ledger_id in enumerate(ledger_ids, start=next_id):
            end = Span(ledger_key(ledger_id), previous.get(ledger_id, 0), version, 1)
            if self.wanted is None or self.wanted(end):
                self.latest[ledger_id] = version
        await self.feed.commit(*ledger_ids, deleted=deleted)

    async def work(self, process: Process) -> None:
        process.collect()
        if process.todo:
            ledger_id = self.rng.choice(sorted(process.todo))
            process.worked.append((ledger_id, process.todo.pop(ledger_id)))

    async def submit(self, process: Process) -> None:
        self.rng.shuffle(process.worked)
        count = self.rng.choice([1, 3])
        for ledger_id, version in process.worked[:count]:
            self.note_submitted(ledger_id, version)
            for _ in range(self.rng.choice([1, 1, 2])):
                process.client.submit({ledger_id: version})
        del process.worked[:count]

    async def fail(self, process: Process) -> None:
        """Submit a failure, and go on with other work until it is stored."""
        if process.worked:
            self.tasks.create_task(self.submit_failure(process, *process.worked.pop()))

    async def submit_failure(self, process: Process, ledger_id: int, version: int) -> None:
        with suppress(ClientFencedError, UnavailableError):
            await process.client.service.submit_failure(ledger_key(ledger_id), version, "odd")

    async def retry(self, process: Process) -> None:
        process.collect()
        await process.client.service.retry_failures()

    async def subscribe_again(self, process: Process) -> None:
        process.collect()
        await process.client.subscribe()
        process.todo |= process.client.missed

    async def die(self, process: Process) -> None:
        """Die at once: work without receipts, and receipts that are not stored, are lost."""
        process.store.is_dead = True
        await self.end(process)

    async def end(self, process: Process) -> None:
        process.stop.set()
        self.process = None
        await settle()

    async def lose_touch(self, process: Process) -> None:
        """Another process starts while this one still believes that it is the client."""
        self.process = None
        while self.process is None:
            await self.start()
        for ledger_id, version in process.worked:
            with suppress(ClientFencedError):
                process.client.submit({ledger_id: version})
        await settle()

    async def start(self) -> None:
        """Start a process. While it subscribes, there may be new checkpoints."""
        store = FaultyStore(
            await self.feed.receipts.open(CLIENT), clock=self.feed.clock, fault=self.fault
        )
        self.stores.append(store)
        promised = self.unreceipted()
        started: asyncio.Future[Process | None] = asyncio.get_running_loop().create_future()
        self.tasks.create_task(self.follow(store, started))
        for _ in range(self.rng.choice([0, 0, 2])):
            for _ in range(self.rng.randrange(30)):
                await asyncio.sleep(0)
            await self.commit()
        self.process = await started
        if self.process is not None and not self.process.client.result.is_new:
            self.check_offer(self.process.client, promised)

    async def follow(self, store: FaultyStore, started: asyncio.Future[Process | None]) -> None:
        stop = asyncio.Event()
        try:
            async with RecoveryService.open(
                self.feed.source,
                store,
                settings=RecoverySettings(compaction_interval_s=self.rng.choice([5, 60])),
                clock=self.feed.clock,
                wanted=self.wanted,
            ) as service:
                client = Client(service, store)
                await client.subscribe()
                process = Process(client=client, store=store, stop=stop)
                process.todo |= client.missed
                self.processes.append(process)
                started.set_result(process)
                await stop.wait()
        except UnavailableError:
            assert not started.done()
            started.set_result(None)
        except ClientFencedError:
            assert started.done()

    async def finish(self) -> None:
        """Start once more, and do all work. Then nothing lacks a receipt.

        A failure that was stored late may appear after a receipt. The next process offers it.
        """
        if self.process is not None:
            await self.end(self.process)
        for store in self.stores:
            await store.settle_late()
        while self.process is None:
            await self.start()
        process = self.process
        await self.feed.commit(0)
        self.latest[0] = self.feed.versions[0]
        for _ in range(3):
            await self.feed.clock.sleep(70)
            await self.subscribe_again(process)
            await self.retry(process)
            process.collect()
            process.worked += process.todo.items()
            process.todo.clear()
            while process.worked:
                await self.submit(process)
        await self.feed.clock.sleep(70)

        state = self.feed.receipts.state(CLIENT)
        assert process.client.service.pending_count == 0
        assert list(process.client.service.failures()) == []
        assert state.low_watermark == self.feed.source.last_id
        assert state.end_by_begin == {}
        assert state.failures == {}

    # --- What must hold ---------------------------------------------------------------------------

    def check_receipts(self) -> None:
        """Receipts cover the latest version of an object only after it was submitted or failed."""
        state = self.feed.receipts.state(CLIENT)
        if state.low_watermark is None:
            self.note_seam()
            return
        unreceipted = self.unreceipted()
        for ledger_id, version in self.latest.items():
            if ledger_id not in unreceipted and version > self.seam:
                failure = state.failures.get(ledger_key(ledger_id))
                is_failed = failure is not None and failure.version >= version
                is_submitted = self.submitted.get(ledger_id, 0) >= version
                assert is_failed or is_submitted, (ledger_id, version, state)

    def check_offer(self, client: Client, promised: dict[int, int]) -> None:
        """A process that starts is offered exactly what has no receipt, and what is new."""
        assert client.result.lifted is None
        for ledger_id, version in self.latest.items():
            offered = client.given.get(ledger_id, client.missed.get(ledger_id))
            if promised.get(ledger_id) == version:
                assert offered == version, (ledger_id, version)
            elif offered is not None:  # committed while the process subscribed
                assert offered == version, (ledger_id, version)
                assert version > promised.get(ledger_id, 0), (ledger_id, version)

    def unreceipted(self) -> dict[int, int]:
        """Return the objects whose latest version the stored receipts do not cover."""
        state = self.feed.receipts.state(CLIENT)
        covered = [(0, state.low_watermark or 0), *state.end_by_begin.items()]
        return {
            ledger_id: version
            for ledger_id, version in self.latest.items()
            if not any(begin <= version <= end for begin, end in covered)
            and not self.has_failed(ledger_id, version)
        }

    def has_failed(self, ledger_id: int, version: int) -> bool:
        failure = self.feed.receipts.state(CLIENT).failures.get(ledger_key(ledger_id))
        return failure is not None and failure.version >= version

    def note_seam(self) -> None:
        """As long as the client is new, nothing before its present process is promised."""
        process = self.process
        if process is not None and process.seam is None:
            process.seam = process.client.service.low_watermark
        if process is None or process.seam is None:
            self.seam = self.feed.source.last_id
        else:
            self.seam = process.seam

    def note_submitted(self, ledger_id: int, version: int) -> None:
        self.submitted[ledger_id] = max(version, self.submitted.get(ledger_id, 0))

    def fault(self) -> StoreFault | None:
        if self.rng.random() >= self.fault_rate:
            return None
        return self.rng.choice(list(StoreFault))


def _is_wanted(span: Span) -> bool:
    ledger_id = ledger_id_of(span.key)
    assert ledger_id is not None
    return ledger_id < 3 or (ledger_id + span.end) % 3 > 0


def test_random_lives_miss_nothing() -> None:
    seeds = [int(SEED)] if SEED else range(SEED_COUNT)
    counts: dict[str, int] = {}
    for seed in seeds:
        life = Life(seed)
        try:
            run(life.run())
        except BaseException as error:
            error.add_note(f"TEST_FEED_SEED={seed}")
            raise
        for name, count in life.counts.items():
            counts[name] = counts.get(name, 0) + count
    print(f"seeds {seeds}: {counts}")
    if not SEED:
        assert min(counts.values()) > SEED_COUNT
        assert len(counts) == 9
