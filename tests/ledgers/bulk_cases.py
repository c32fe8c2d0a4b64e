"""Helpers for the tests of the bulk path: ledgers, fake bookies, and what must hold after each
transfer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.digest import EntryDigest
from ledgers.health import BookieHealth
from ledgers.model import DigestType
from tests.fake_bookie import FakeBookie
from tests.ledgers.given import Act, given_by
from tests.virtual_time import LoopClock

LEDGER_ID = 7
DIGEST = EntryDigest(DigestType.CRC32C, b"foobar")
STEP_S = 100.0
"""More than anything here takes or skips: reaching it is a failure, not a measurement."""

SHORT_TIMEOUT_S = 5.0
"""For scenes in which bookies fall silent and the clock is put forward."""

NO_TIMEOUT_S = 10 * STEP_S
"""For all others: what has to happen at once shall not be rescued by the time-out."""

READS_IN_FLIGHT_MAX = 64


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test moves forward, so that no test waits for a timeout."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


@dataclass(slots=True, kw_only=True)
class Scene:
    """Two sources with the same entries, a target, and the bulk path under test."""

    a: FakeBookie
    b: FakeBookie
    target: FakeBookie
    budgets: Budgets
    bulk: BulkTransfers
    others: list[FakeBookie] = field(default_factory=list)

    @property
    def bookies(self) -> list[FakeBookie]:
        return [self.a, self.b, self.target, *self.others]

    def fill(
        self, entry_ids: Iterable[int], *, payload: bytes = b"p", ledger_id: int = LEDGER_ID
    ) -> None:
        for source in (self.a, self.b):
            source.put(DIGEST, ledger_id, entry_ids, payload)

    def halves(self, count: int, **changes: Any) -> Transfer:
        """Return a copy of entries 0 to ``count``: even ones from ``a`` and odd ones from ``b``."""
        transfer: dict[str, Any] = {
            "ledger_id": LEDGER_ID,
            "digest": DIGEST,
            "reads": {self.a.bookie_id: range(0, count, 2), self.b.bookie_id: range(1, count, 2)},
            "target": self.target.bookie_id,
        }
        return Transfer(**(transfer | changes))

    def runs(self, count: int, **changes: Any) -> Transfer:
        """Return the same copy with the first entries from ``a`` and the last from ``b``."""
        reads = {self.a.bookie_id: range(count // 2), self.b.bookie_id: range(count // 2, count)}
        return self.halves(count, **({"reads": reads} | changes))

    async def run(self, transfer: Transfer) -> TransferResult:
        """Run the transfer and check what holds for every result."""
        result = await asyncio.wait_for(self.bulk.transfer(transfer), STEP_S)
        self.check(transfer, result)
        return result

    def check(self, transfer: Transfer, result: TransferResult) -> None:
        """Check that each entry has exactly one result, and that good ones are on the target, byte
        for byte."""
        asked = {entry_id for entry_ids in transfer.reads.values() for entry_id in entry_ids}
        refused = [(bookie, e) for bookie, failed in result.failures.items() for e in failed]
        of_reads = [e for bookie, e in refused if e in transfer.reads.get(bookie, ())]
        failed = set(of_reads)
        good = asked - failed - result.unwritten

        assert len(of_reads) == len(failed)
        assert not failed & result.unwritten
        assert failed | result.unwritten <= asked
        assert result.entry_count == len(good)
        assert (result.target_error is not None) or not result.unwritten
        for bookie, failures in result.failures.items():
            assert set(failures) <= transfer.asked_of(bookie)
            assert Answer.PRESENT not in failures.values()
        source_of = {e: bookie for bookie, ids in transfer.reads.items() for e in ids}
        stored = {bookie.bookie_id: bookie.entries for bookie in self.bookies}
        weight = 0
        for entry_id in good:
            key = (transfer.ledger_id, entry_id)
            entry = stored[source_of[entry_id]][key]
            weight += len(entry)
            assert transfer.digest.is_good(entry, ledger_id=key[0], entry_id=entry_id)
            if transfer.target is not None:
                assert stored[transfer.target][key] == entry
        assert result.entry_bytes == weight

    def skip(self, duration_s: float) -> None:
        """Move the loop's clock forward."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkippingLoop)
        loop.skipped_s += duration_s

    async def wait_checks(self, duration_s: float) -> None:
        """Move the clock forward in steps, so that every periodic check between them runs."""
        for _ in range(round(duration_s / 0.5)):
            self.skip(0.5)
            await self.settle()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop run until the condition is true."""
        async with asyncio.timeout(STEP_S):
            while not condition():  # noqa: ASYNC110 - nothing announces what is waited for
                await asyncio.sleep(0.001)

    async def until_read(self, count: int) -> None:
        await self.until(lambda: self.bulk.totals.entries_read >= count)

    async def settle(self) -> None:
        """Let everything run that needs no outside help."""
        for _ in range(50):
            await asyncio.sleep(0)

    def is_at_rest(self) -> bool:
        """Return True if no credit is in use and no transfer is remembered."""
        connections = self.bulk._connections()
        windows = [self.bulk.memory.window]
        windows += [target.limiter.window for target in self.bulk._targets.values()]
        windows += [c._window for source in self.bulk._sources.values() for c in source.connections]
        windows += [self.budgets.reads(bookie) for bookie in self.bulk._sources]
        return not any(c.is_busy for c in connections) and all(
            window.count == 0 and window.entry_bytes == 0 for window in windows
        )


@asynccontextmanager
async def scene(
    *,
    reads_in_flight_max: int = READS_IN_FLIGHT_MAX,
    other_count: int = 0,
    timeout_s: float = NO_TIMEOUT_S,
    reads_batches: bool = False,
    yields: bool = False,
    **options: Any,
) -> AsyncIterator[Scene]:
    """Yield a scene. ``options``: of BulkTransfers. At the end nothing may be left over."""
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(FakeBookie(seed=n)) for n in range(3 + other_count)
        ]
        budgets = Budgets(reads_in_flight_max=reads_in_flight_max)
        bulk = BulkTransfers(
            budgets,
            timeout_s=timeout_s,
            reads_batches=reads_batches,
            yields=yields,
            health=BookieHealth(LoopClock()),
            **options,
        )
        stack.push_async_callback(bulk.close)
        made = Scene(
            a=fakes[0], b=fakes[1], target=fakes[2], others=fakes[3:], budgets=budgets, bulk=bulk
        )
        yield made
        await bulk.close()
        assert made.is_at_rest()


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run one scene in its own loop. ``options``: of ``scene``."""

    async def run() -> None:
        async with scene(**options) as made:
            await act(made)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(run())


def in_scene(*names: str, **options: Any) -> Callable[[Act], Callable[..., None]]:
    """Make a test of a coroutine function whose first argument is a scene. ``names``: arguments of
    the test that are options of ``scene`` too."""
    return given_by(
        lambda act, arguments: play(act, **options, **{name: arguments[name] for name in names})
    )
