"""Requests to bookies in quarantine, and what their answers change."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from ledgers.bookies import Answer, Bookies, Transfer
from ledgers.digest import EntryDigest
from ledgers.errors import BusyError, NoAnswerError, UnavailableError
from ledgers.health import WAIT_MIN_S, AnsweringBookies, BookieHealth
from ledgers.model import BookieId, DigestType
from tests.ledgers.given import Act, given_by
from tests.memory.bookies import Fault, MemoryBookies, Op
from tests.virtual_time import LoopClock, run

A, B, TARGET = BookieId("a:3181"), BookieId("b:3181"), BookieId("t:3181")
DIGEST = EntryDigest(DigestType.CRC32C, b"secret")
SILENT = Fault(delay_s=5, error=NoAnswerError)


class Scene:
    """Bookies of which A and B have entries 0 to 9 of ledger 7, and what is known of them."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.inner = MemoryBookies((A, B, TARGET), clock=self.clock)
        self.quarantine = BookieHealth(self.clock, lambda bookie: 1)
        self.bookies = AnsweringBookies(self.inner, self.quarantine)
        for entry_id in range(10):
            entry = DIGEST.pack(ledger_id=7, entry_id=entry_id, lac=-1, length=1, payload=b"p")
            for bookie in (A, B):
                self.inner.bookie(bookie).add(
                    entry, master_key=DIGEST.master_key, is_recovery=False, is_high_priority=False
                )

    def stop_answering(self, bookie: BookieId) -> None:
        for op in (Op.READ, Op.ADD, Op.READ_LAC):
            self.inner.fail(bookie, op, SILENT)

    def answer_again(self, bookie: BookieId) -> None:
        for op in (Op.READ, Op.ADD, Op.READ_LAC):
            self.inner.stop_failing(bookie, op)

    async def learn(self, bookie: BookieId) -> None:
        """Let the bookie become unresponsive, and find that out."""
        self.stop_answering(bookie)
        with pytest.raises(NoAnswerError):
            await self.bookies.read_lac(bookie, 7)


def transfer(target: BookieId | None = None) -> Transfer:
    """Return a transfer of even entries from A and odd ones from B."""
    reads = {A: range(0, 10, 2), B: range(1, 10, 2)}
    return Transfer(ledger_id=7, digest=DIGEST, reads=reads, target=target)


def play(test: Act, _: object) -> None:
    async def main() -> None:
        await test(Scene())

    run(main())


in_scene = given_by(play)


@in_scene
async def test_the_second_request_to_an_unresponsive_one_is_fast(scene: Scene) -> None:
    await scene.learn(A)
    before_s = scene.clock.now_s()

    with pytest.raises(NoAnswerError, match="in quarantine"):
        await scene.bookies.read(A, 7, 0)
    result = await scene.bookies.transfer(transfer())

    assert scene.clock.now_s() == before_s
    assert result.failures == {A: dict.fromkeys(range(0, 10, 2), Answer.UNKNOWN)}
    assert result.entry_count == 5, "what B has is had from B"
    assert scene.bookies.source_health(A).is_unhealthy
    assert not scene.bookies.source_health(B).is_unhealthy


@in_scene
async def test_a_transfer_with_all_sources_in_quarantine_asks_none(scene: Scene) -> None:
    await scene.learn(A)
    await scene.learn(B)

    result = await scene.bookies.transfer(transfer(TARGET))

    assert set(result.failures) == {A, B}
    assert result.target_error is None


@in_scene
async def test_a_target_in_quarantine_fails_before_any_read(scene: Scene) -> None:
    await scene.learn(TARGET)
    before_s = scene.clock.now_s()

    result = await scene.bookies.transfer(transfer(TARGET))

    assert isinstance(result.target_error, NoAnswerError)
    assert result.unwritten == frozenset(range(10))
    assert scene.clock.now_s() == before_s


@pytest.mark.parametrize("silent", [A, B, TARGET])
@in_scene
async def test_quarantined_bookies_are_not_asked_for_checks_either(
    scene: Scene, silent: BookieId
) -> None:
    await scene.learn(silent)
    before_s = scene.clock.now_s()
    copy = replace(transfer(TARGET), reads={A: range(10)}, checks={B: (0, 9)})

    result = await scene.bookies.transfer(copy)

    assert scene.clock.now_s() == before_s
    unread = {A: dict.fromkeys(range(10), Answer.UNKNOWN)} if silent == A else {}
    unchecked = {B: dict.fromkeys((0, 9), Answer.UNKNOWN)}
    assert result.failures == unread | unchecked
    assert (result.target_error is not None) == (silent == TARGET)


@pytest.mark.parametrize("silent", [A, TARGET])
@in_scene
async def test_unanswered_reads_of_a_transfer_begin_it(scene: Scene, silent: BookieId) -> None:
    scene.stop_answering(silent)

    await scene.bookies.transfer(transfer(TARGET))

    assert set(scene.quarantine.shut()) == {silent}


@pytest.mark.parametrize("error", [BusyError, UnavailableError])
@in_scene
async def test_a_bookie_that_answers_with_an_error_is_not_put_there(
    scene: Scene, error: type[UnavailableError]
) -> None:
    for op in (Op.READ, Op.ADD):
        scene.inner.fail(A, op, Fault(error=error))
        scene.inner.fail(TARGET, op, Fault(error=error))

    await scene.bookies.transfer(transfer(TARGET))
    with pytest.raises(error):
        await scene.bookies.read(A, 7, 0)

    assert scene.quarantine.shut() == {}


Probe = Callable[[Bookies], Awaitable[object]]
PROBES = [
    pytest.param(lambda b: b.read_lac(A, 7), A, id="a request"),
    pytest.param(lambda b: b.read(A, 7, 99), A, id="a request that is answered with a no"),
    pytest.param(lambda b: b.transfer(transfer()), A, id="a source"),
    pytest.param(lambda b: b.transfer(transfer(TARGET)), TARGET, id="a target"),
]


@pytest.mark.parametrize(("probe", "bookie"), PROBES)
@in_scene
async def test_an_answered_probe_ends_it(scene: Scene, probe: Probe, bookie: BookieId) -> None:
    await scene.learn(bookie)
    scene.answer_again(bookie)
    await scene.clock.sleep(WAIT_MIN_S)

    await asyncio.gather(probe(scene.bookies), return_exceptions=True)

    assert not scene.quarantine.holds(bookie)


@pytest.mark.parametrize(("probe", "bookie"), PROBES)
@in_scene
async def test_a_failed_probe_prolongs_it(scene: Scene, probe: Probe, bookie: BookieId) -> None:
    await scene.learn(bookie)
    await scene.clock.sleep(WAIT_MIN_S)

    await asyncio.gather(probe(scene.bookies), return_exceptions=True)

    await scene.clock.sleep(WAIT_MIN_S)
    assert scene.quarantine.is_shut(bookie)


@in_scene
async def test_a_source_given_up_early_is_still_in_quarantine(scene: Scene) -> None:
    """The transfer waited for a short time only."""
    await scene.learn(A)
    scene.inner.fail(A, Op.READ, Fault(error=UnavailableError))
    await scene.clock.sleep(WAIT_MIN_S)

    result = await scene.bookies.transfer(transfer())

    assert result.unresponsive == frozenset()
    assert scene.quarantine.is_shut(A)


@pytest.mark.parametrize(("probe", "bookie"), PROBES)
@in_scene
async def test_a_cancelled_probe_makes_way_for_the_next(
    scene: Scene, probe: Probe, bookie: BookieId
) -> None:
    await scene.learn(bookie)
    await scene.clock.sleep(WAIT_MIN_S)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await probe(scene.bookies)

    assert scene.quarantine.holds(bookie)
    assert not scene.quarantine.is_shut(bookie)


@in_scene
async def test_a_source_not_asked_because_of_the_target_needs_a_probe(scene: Scene) -> None:
    await scene.learn(B)
    await scene.clock.sleep(WAIT_MIN_S)
    scene.stop_answering(TARGET)

    result = await scene.bookies.transfer(transfer(TARGET))

    assert result.target_error is not None
    assert scene.quarantine.holds(B)
    assert not scene.quarantine.is_shut(B)
    assert scene.quarantine.is_shut(TARGET)
