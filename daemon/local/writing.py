"""Writes ledgers of many shapes: those of ``bookmender local write`` and ``local demo``.

If the writing stops early, the ledgers written so far remain. A ledger that was begun is left as
if its writer had died.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from daemon.admin_session import AdminSession, admin_session
from daemon.settings import Settings
from daemon.words import counted
from ledgers.appending import BookiePool
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Bookies
from ledgers.client import open_bookies
from ledgers.clock import Clock, SystemClock
from ledgers.errors import NotEnoughBookiesError
from ledgers.manager import LedgerManager
from ledgers.model import DigestType
from ledgers.placement import Candidate, RandomPlacement
from ledgers.registration import Registration
from ledgers.tasks import task_scope
from ledgers.writing import LedgerOptions, LedgerWriter

QUORUMS = ((2, 2, 1), (2, 2, 2), (3, 2, 2), (3, 3, 2), (3, 3, 3), (4, 2, 2), (5, 3, 2))
"""Ensemble size, write quorum and ack quorum. No ledger depends on one bookie alone."""
DIGEST_TYPES = tuple(DigestType)
METADATA_VERSIONS = (3, 3, 2)
SIZES = (
    *((1, 40), (100, 60), (1_000, 100), (1_000, 30), (10_000, 20)),
    *((65_536, 6), (0, 5), (1_000, 1), (1_000, 0)),
)
"""Payload bytes of an entry, and the number of such entries."""
LARGE, LARGE_EVERY = (1_000_000, 5), 50
OPEN_SIZE = (1_000, 50)
"""The size of a ledger that is left open."""

LEDGERS_AT_ONCE = 12
READS_IN_FLIGHT_MAX = 64
PASSWORD = b"demo"
LEFT_SHOWN_MAX = 10
CLOSE_HINT = "`bookmender ledger close ID --force --yes` closes one at its end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of one ledger. ``number``: makes its payloads differ from those of others."""

    number: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest_type: DigestType
    metadata_version: int
    entry_bytes: int
    entry_count: int
    is_left_open: bool = False

    def payload(self, entry_id: int) -> bytes:
        """Return ``entry_bytes`` bytes that differ for every entry of every shape."""
        seed = hashlib.sha256(f"{self.number}:{entry_id}".encode()).digest()
        return (seed * (self.entry_bytes // len(seed) + 1))[: self.entry_bytes]


def shapes_to_try(ledger_count: int, *, open_count: int, bookie_count: int) -> list[Shape]:
    """Return ``ledger_count`` shapes that survive the loss of a bookie, the same in every run. The
    last ``open_count`` ledgers are left open without a writer.

    Each entry has at least two copies, and at least one bookie is left that can take over. Raises
    NotEnoughBookiesError for fewer than three bookies.
    """
    quorums = [quorum for quorum in QUORUMS if quorum[0] < bookie_count]
    if not quorums:
        raise NotEnoughBookiesError(
            "ledgers that survive the loss of a bookie need three writable ones"
        )
    shapes = []
    for number in range(ledger_count):
        ensemble_size, write_quorum, ack_quorum = quorums[number % len(quorums)]
        is_large = number % LARGE_EVERY == LARGE_EVERY - 1
        entry_bytes, entry_count = LARGE if is_large else SIZES[number % len(SIZES)]
        if is_left_open := number >= ledger_count - open_count:
            # With an ack quorum of 1, the lost bookie might have acknowledged entries alone, so the
            # ledger would stay IN_RECOVERY until that bookie returns.
            ack_quorum = max(2, ack_quorum)
            entry_bytes, entry_count = OPEN_SIZE
        shapes.append(
            Shape(
                number=number,
                ensemble_size=ensemble_size,
                write_quorum=write_quorum,
                ack_quorum=ack_quorum,
                digest_type=DIGEST_TYPES[number % len(DIGEST_TYPES)],
                metadata_version=METADATA_VERSIONS[number % len(METADATA_VERSIONS)],
                entry_bytes=entry_bytes,
                entry_count=entry_count,
                is_left_open=is_left_open,
            )
        )
    return shapes


@dataclass(slots=True)
class Written:
    """A ledger and the number of its acknowledged entries, which have the ids 0 to ``acknowledged -
    1``."""

    shape: Shape
    ledger_id: int
    acknowledged: int = 0
    is_closed: bool = False

    @property
    def is_done(self) -> bool:
        """Return True if the ledger has all its entries, and is closed or should be left open."""
        has_all = self.acknowledged >= self.shape.entry_count
        return has_all if self.shape.is_left_open else self.is_closed

    def payload(self, entry_id: int) -> bytes:
        return self.shape.payload(entry_id)


@dataclass(slots=True)
class Workload:
    """Writes ledgers as an application would. ``written``: each ledger that was begun."""

    manager: LedgerManager
    registration: Registration
    bookies: Bookies
    clock: Clock
    rng: random.Random
    written: list[Written] = field(default_factory=list)

    async def write(self, ledger_count: int, *, open_count: int) -> None:
        """Write ledgers, several at once, and those that are left open last. Raises what
        ``LedgerWriter`` raises, and NotEnoughBookiesError for fewer than three bookies."""
        bookie_count = len((await self.registration.read()).writable)
        shapes = shapes_to_try(ledger_count, open_count=open_count, bookie_count=bookie_count)
        closed_count = ledger_count - open_count
        for part in (shapes[:closed_count], shapes[closed_count:]):
            await self.write_at_once(part)

    async def write_at_once(self, shapes: Sequence[Shape]) -> None:
        slots = asyncio.Semaphore(LEDGERS_AT_ONCE)

        async def write_one(shape: Shape) -> None:
            async with slots:
                written = await self.begin(shape)
                async with self.writer(written) as writer:
                    await fill(writer, written)

        async with task_scope() as scope:
            await asyncio.gather(*(scope.start(write_one(shape)) for shape in shapes))

    async def begin(self, shape: Shape) -> Written:
        """Record the ledger before it is created, so that every ledger that exists is reported."""
        written = Written(shape=shape, ledger_id=await self.manager.new_ledger_id())
        self.written.append(written)
        return written

    def writer(self, written: Written) -> AbstractAsyncContextManager[LedgerWriter]:
        """Create the ledger."""
        shape = written.shape
        return LedgerWriter.create(
            LedgerOptions(
                ensemble_size=shape.ensemble_size,
                write_quorum=shape.write_quorum,
                ack_quorum=shape.ack_quorum,
                digest_type=shape.digest_type,
                password=PASSWORD,
                metadata_version=shape.metadata_version,
            ),
            manager=self.manager,
            bookies=self.bookies_for(shape),
            pool=BookiePool(writable=self._writable, placement=RandomPlacement(self.rng)),
            clock=self.clock,
            random=self.rng,
            ledger_id=written.ledger_id,
        )

    def bookies_for(self, shape: Shape) -> Bookies:
        return self.bookies

    async def _writable(self) -> list[Candidate]:
        view = await self.registration.read()
        return [Candidate(bookie=bookie) for bookie in view.writable]


async def fill(writer: LedgerWriter, written: Written) -> None:
    """Write all entries, and close the ledger unless it is left open."""
    payloads = map(written.payload, range(written.shape.entry_count))
    if written.shape.is_left_open:  # one by one: each entry confirms the previous one
        for each in payloads:
            await writer.add(each)
    else:
        await asyncio.gather(*[await writer.send(each) for each in payloads])
    written.acknowledged = written.shape.entry_count
    if not written.shape.is_left_open:
        await writer.close()
        written.is_closed = True


@asynccontextmanager
async def open_workload(seen: AdminSession, rng: random.Random) -> AsyncIterator[Workload]:
    """Open a workload with a bookie client of its own, as a writing application would."""
    async with open_bookies(
        reads_in_flight_max=READS_IN_FLIGHT_MAX, connector=bookie_connector(seen.settings.security)
    ) as bookies:
        yield Workload(
            manager=seen.manager,
            registration=seen.registration,
            bookies=bookies,
            clock=SystemClock(),
            rng=rng,
        )


def write_ledgers(
    settings: Settings, ledger_count: int, *, written: list[Written], open_count: int = 0
) -> None:
    """Write ledgers that survive the loss of a bookie, and close all except the last
    ``open_count``.

    ``written``: receives each ledger when it is begun, so it is valid after any error. Raises
    NotEnoughBookiesError, also for fewer than three writable bookies; UnavailableError.
    """

    async def write() -> None:
        rng = random.Random()
        async with admin_session(settings) as seen, open_workload(seen, rng) as workload:
            workload.written = written
            await workload.write(ledger_count, open_count=open_count)

    asyncio.run(write())


def what_was_written(
    written: Sequence[Written], *, ledger_count: int, ended: str = ""
) -> list[str]:
    """Return lines of text about the ledgers that were written. ``ledger_count``: the number
    requested. ``ended``: one word about an early end; then the text says how to go on."""
    if ended and not written:
        return [f"{ended}; nothing was written"]
    done = [each for each in written if each.is_done]
    entries = counted(sum(each.acknowledged for each in done), "entry")
    of = "" if len(done) == ledger_count else f"{len(done):,} of "
    summary = f"wrote {of}{counted(ledger_count, 'ledger')}, {entries}"
    lines = [f"{ended}; {summary}: they stay" if ended else summary]
    if left := sorted(each.ledger_id for each in written if not each.is_closed):
        shown = ", ".join(map(str, left[:LEFT_SHOWN_MAX]))
        more = f" and {len(left) - LEFT_SHOWN_MAX:,} more" if len(left) > LEFT_SHOWN_MAX else ""
        hint = f", unless it was not created; {CLOSE_HINT}" if ended else ""
        lines.append(f"left open without a writer: ledger {shown}{more}{hint}")
    return lines
