"""A bookie that is slow, but not silent, costs only the transfers that need it."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import WINDOW_BYTES_MIN, WINDOW_ENTRIES_MIN, BookieWindow, Budgets
from ledgers.codec.registration import Address
from ledgers.errors import NoAnswerError
from ledgers.health import BookieHealth
from ledgers.model import BookieId
from tests.fake_bookie import FakeBookie
from tests.ledgers.bulk_cases import DIGEST
from tests.ledgers.given import Act, given_by
from tests.virtual_time import LoopClock, run

P = TypeVar("P", bound=asyncio.BaseProtocol)

ENTRY_COUNT = 400
PAYLOAD = bytes(65_000)
HEALTHY_PER_S = 3_000.0
LEDGER, SLOW_LEDGER = 7, 100


class PacedBookie(FakeBookie):
    """A bookie in this process that answers one request after the other, at a constant rate."""

    def __init__(self, name: str, replies_per_s: float = HEALTHY_PER_S) -> None:
        super().__init__()
        self.name, self.replies_per_s = name, replies_per_s
        self.latency_s = 0.0

    @property
    def bookie_id(self) -> BookieId:
        return BookieId(f"{self.name}:3181")


class PacedTransport:
    """A connection to a ``PacedBookie``."""

    def __init__(self, bookie: PacedBookie, protocol: asyncio.BufferedProtocol) -> None:
        self._bookie, self._protocol = bookie, protocol
        self._received = b""
        self._free_s = 0.0
        self._is_open = True
        protocol.connection_made(cast(asyncio.Transport, self))

    def write(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._received += data
        while (stop := 4 + int.from_bytes(self._received[:4], "big")) <= len(self._received) > 4:
            packet, self._received = self._received[4:stop], self._received[stop:]
            self._free_s = max(self._free_s, loop.time()) + 1 / self._bookie.replies_per_s
            loop.call_at(self._free_s + self._bookie.latency_s, self._answer, packet)

    def _answer(self, packet: bytes) -> None:
        for reply in self._bookie._replies(packet):
            while reply and self._is_open:
                buffer = cast(memoryview, self._protocol.get_buffer(-1))
                part, reply = reply[: len(buffer)], reply[len(buffer) :]
                buffer[: len(part)] = part
                self._protocol.buffer_updated(len(part))

    def abort(self) -> None:
        self._is_open = False

    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Copies:
    """Bookies, and the bulk path between them."""

    def __init__(self) -> None:
        self._bookies: dict[str, PacedBookie] = {}
        self.bulk = BulkTransfers(
            Budgets(reads_in_flight_max=500),
            yields=False,
            connector=self._connect,
            health=BookieHealth(LoopClock()),
        )

    async def _connect(
        self, factory: Callable[[], P], address: Address
    ) -> tuple[asyncio.Transport, P]:
        protocol = factory()
        assert isinstance(protocol, asyncio.BufferedProtocol)
        transport = PacedTransport(self._bookies[address.host], protocol)
        return cast(asyncio.Transport, transport), protocol

    def bookie(self, replies_per_s: float = HEALTHY_PER_S) -> PacedBookie:
        name = f"b{len(self._bookies)}"
        made = self._bookies[name] = PacedBookie(name, replies_per_s)
        return made

    async def copy(
        self, source: PacedBookie, target: PacedBookie | None, ledger_id: int, **options: Any
    ) -> TransferResult:
        source.put(DIGEST, ledger_id, range(ENTRY_COUNT), PAYLOAD)
        return await self.bulk.transfer(
            Transfer(
                ledger_id=ledger_id,
                digest=DIGEST,
                reads={source.bookie_id: range(ENTRY_COUNT)},
                target=None if target is None else target.bookie_id,
                **options,
            )
        )

    async def copy_s(self, source: PacedBookie, target: PacedBookie) -> float:
        """Copy a ledger, and return the time it took."""
        began_s = asyncio.get_running_loop().time()
        result = await self.copy(source, target, LEDGER)
        assert result.entry_count == ENTRY_COUNT
        return asyncio.get_running_loop().time() - began_s


def play(act: Act, _: object) -> None:
    async def acting() -> None:
        copies = Copies()
        try:
            await act(copies)
        finally:
            await copies.bulk.close()

    run(acting())


with_copies = given_by(play)


@pytest.mark.parametrize("replies_per_s", [1.0, 50.0])
@pytest.mark.parametrize(
    ("role", "slow_count"),
    [
        ("target", 12),
        ("source", 12),
        ("verified", 12),
        ("source of one target", 3),  # more of them would fill the first window of the target
        ("target of one source", 12),
    ],
)
@with_copies
async def test_slow_bookies_do_not_delay_copies_between_others(
    copies: Copies, role: str, slow_count: int, replies_per_s: float
) -> None:
    alone_s = await copies.copy_s(copies.bookie(), copies.bookie())
    source, target = copies.bookie(), copies.bookie()
    async with asyncio.TaskGroup() as tasks:
        slow_copies = []
        for n in range(slow_count):
            slow = copies.bookie(replies_per_s)
            ends = {
                "target": (copies.bookie(), slow),
                "source": (slow, copies.bookie()),
                "verified": (slow, None),
                "source of one target": (slow, target),
                "target of one source": (source, slow),
            }[role]
            copying = copies.copy(*ends, SLOW_LEDGER + n)
            slow_copies.append(tasks.create_task(copying))
        await asyncio.sleep(1.0)

        beside_s = await copies.copy_s(source, target)

        assert not any(copy.done() for copy in slow_copies)
        assert beside_s < 2 * alone_s
        for copy in slow_copies:
            copy.cancel()


@pytest.mark.parametrize(
    ("role", "replies_per_s", "is_given_up"),
    [
        pytest.param("target", 1.0, True, id="a target"),
        pytest.param("source with others", 1.5, True, id="a source, and there are others"),
        pytest.param("verified", 1.0, True, id="a copy that is only verified"),
        pytest.param("source", 1.0, False, id="the last source: slow is better than nothing"),
        pytest.param("target", 20.0, False, id="a target that keeps up with a small window"),
        pytest.param("verified", 20.0, False, id="a copy that is read slowly"),
    ],
)
@with_copies
async def test_a_trickle_of_replies_counts_as_no_answer(
    copies: Copies, role: str, replies_per_s: float, is_given_up: bool
) -> None:
    slow, other = copies.bookie(replies_per_s), copies.bookie()
    ends = (other, slow) if role == "target" else (slow, None if role == "verified" else other)

    result = await copies.copy(*ends, LEDGER, has_alternatives=role == "source with others")

    assert (result.entry_count < ENTRY_COUNT) is is_given_up
    assert isinstance(result.target_error, NoAnswerError) is (is_given_up and role == "target")
    if role != "target":
        assert (slow.bookie_id in result.unresponsive) is is_given_up
        assert set(result.failures.get(slow.bookie_id, {}).values()) <= {Answer.UNKNOWN}
        is_unhealthy = copies.bulk.source_health(slow.bookie_id).is_unhealthy
        assert is_unhealthy is (replies_per_s < 2)


@with_copies
async def test_a_bookie_is_not_slow_because_few_entries_are_sent_to_it(copies: Copies) -> None:
    source, target = copies.bookie(), copies.bookie()
    source.latency_s = target.latency_s = 2.0
    copies.bulk.rate_limit.set(entries_per_s=2, bytes_per_s=0)

    result = await copies.copy(source, target, LEDGER)

    assert result.entry_count == ENTRY_COUNT


@with_copies
async def test_a_distant_bookie_is_not_a_slow_one(copies: Copies) -> None:
    source, target = copies.bookie(), copies.bookie()
    source.latency_s = target.latency_s = 0.5  # longer than the time between two checks

    copied_s = await copies.copy_s(source, target)

    assert copied_s < 12, "a full window at a time, and few round trips to widen it"


def test_the_window_follows_the_replies() -> None:
    window = BookieWindow(count_max=1_000, bytes_max=8 << 20)
    narrowest = (WINDOW_ENTRIES_MIN, WINDOW_BYTES_MIN)

    def limits() -> tuple[int, int]:
        return window.count_max, window.bytes_max

    assert limits() == narrowest
    for _ in range(10):  # it doubles, up to its maximum
        window.note_replies(window.bytes_max, count=window.count_max)
    assert limits() == (1_000, 8 << 20)
    window.adapt(1_000, 0)  # the bookie answered more than waits now
    assert limits() == (1_000, 8 << 20)
    for _ in range(3):
        window.note_replies(800_000, count=100)
        window.adapt(0, 0)  # nothing waits for it
    assert limits() == (1_000, 8 << 20)
    for _ in range(20):
        window.note_replies(800_000, count=100)
        window.adapt(1_000, 0)
    assert limits() == (100, 800_000)
    for _ in range(20):
        window.adapt(100, 0)
    assert limits() == narrowest
