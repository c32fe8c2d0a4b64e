"""A bookie that hangs, is slow or full or sends garbage delays only ledgers that need it.

A proxy between our daemon and the bad bookie is registered in place of the bookie. The tests
compare the order of events: all other ledgers are repaired before the first ledger that touches the
bad bookie is done, although the latter were marked first.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from daemon.local.spec import port_of
from ledgers.codec.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from ledgers.errors import NoNodeError
from ledgers.model import BookieId
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import (
    expire,
    make_read_only,
    make_writable,
)
from tests.cluster.steps import NONEXISTENT, Bench, bench, errors, events, nodes, shape, wait_for
from tests.tcp_proxy import TcpProxy
from tests.workload import Written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
LONG = pytest.mark.long(group="repair")

SLOTS = 20
FEW, CROWD = SLOTS // 2, 2 * SLOTS
"""Ledgers that touch the bad bookie: some of the slots of a worker, or more than all."""
OTHERS = 30
SLOW_S = 3.0
"""Shorter than the timeout of a bookie."""
COSTS_S = {"hang": SLOW_S, "be_slow": SLOW_S, "send_garbage": 0.0}
"""The time that each ledger loses to the bad bookie, at least. On a machine so busy that the repair
of all other ledgers takes longer, the order of the repairs says nothing."""
SEED = 7


def hang(proxy: TcpProxy) -> None:
    proxy.hold_replies()


def be_slow(proxy: TcpProxy) -> None:
    proxy.reply_delay_s = SLOW_S


def send_garbage(proxy: TcpProxy) -> None:
    noise = random.Random(SEED)
    proxy.garble = lambda piece: noise.randbytes(len(piece))


with_each_trouble = pytest.mark.parametrize(
    ("trouble", "touching_count"),
    [
        pytest.param(hang, FEW, id="it hangs"),
        pytest.param(
            hang, CROWD, marks=LONG, id="it hangs, and more ledgers need it than a worker has slots"
        ),
        pytest.param(be_slow, FEW, marks=LONG, id="it is slow"),
        pytest.param(send_garbage, CROWD, marks=LONG, id="it sends garbage"),
    ],
)


@with_each_trouble
async def test_a_bad_source_delays_only_its_own_ledgers(
    module_cluster: LocalCluster,
    tmp_path: Path,
    trouble: Callable[[TcpProxy], None],
    touching_count: int,
) -> None:
    bad = module_cluster.bookies[0]

    async with scene(module_cluster, bad, tmp_path) as (on, proxy, start):
        touching, others = await write_apart(on, bad, touching_count=touching_count)
        await proxy.register(is_writable=False)  # so that the bookie is no target
        trouble(proxy)
        node = start()
        for number, ledger in enumerate(touching):
            await lose_but(on, ledger, bad, number=number)
        await proxy.wait_reply()  # the first of them is under way
        under_way_s = time.monotonic()
        await on.lose(others)
        await wait_for(lambda: ids(others) <= set(concluded(node)), "others repaired")
        took_s = time.monotonic() - under_way_s

        are_first = took_s < COSTS_S[trouble.__name__]
        assert_others_repaired(ids(others), ids(touching), node, are_first=are_first)
        assert errors(node) == []
        if trouble is hang:
            await wait_for(
                lambda: ids(touching) <= set(concluded(node)), "unresponsive bookie noticed"
            )
            assert bad in [e["bookie"] for e in events(node, "bookie.quarantined")]
        await get_well(on, proxy)
        await on.assert_whole([*touching, *others])


@LONG
@with_each_trouble
async def test_a_bad_target_delays_only_its_own_ledgers(
    module_cluster: LocalCluster,
    tmp_path: Path,
    trouble: Callable[[TcpProxy], None],
    touching_count: int,
) -> None:
    """The bad bookie is the only possible target of wide ledgers. Then it counts as read-only."""
    bad = module_cluster.bookies[0]

    async with scene(module_cluster, bad, tmp_path) as (on, proxy, start):
        wide = shape(1, quorums=(5, 2, 2))
        touching = await on.write(*(wide for _ in range(touching_count)))
        _, (first, *others) = await write_apart(on, bad, touching_count=0)
        await proxy.register(is_writable=True)
        node = start()
        await on.lose([first])
        await wait_for(lambda: concluded(node) == [first.ledger_id], "the node at work")
        trouble(proxy)
        proxy.expect_reply()
        for ledger in touching:
            await on.lose([ledger], index=await index_of(on, ledger, bad))
        await proxy.wait_reply()  # to an add
        under_way_s = time.monotonic()
        await proxy.register(is_writable=False)
        await on.lose(others)
        await wait_for(lambda: ids(others) <= set(concluded(node)), "others repaired")
        took_s = time.monotonic() - under_way_s

        are_first = took_s < COSTS_S[trouble.__name__]
        assert_others_repaired(ids(others), ids(touching), node, are_first=are_first)
        assert errors(node) == []
        await get_well(on, proxy)
        await on.assert_whole([*touching, *others])


@LONG
def test_a_full_bookie_gets_no_copy_and_causes_no_delay(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    """A full bookie refuses all adds, while its registration still says writable."""
    full = module_cluster.bookies[0]

    async def run() -> None:
        async with scene(module_cluster, full, tmp_path) as (on, proxy, start):
            written = await on.write(*(shape(number) for number in range(OTHERS)))
            node = start()
            await proxy.register(is_writable=True)
            await on.lose(written)
            await on.wait_repaired(written, NONEXISTENT)

            assert events(node, "ledger.deferred") == []
            assert errors(node) == []
            assert await on.names(written, full) == []
            await on.assert_whole(written)

    make_read_only(module_cluster, full)
    asyncio.run(run())
    expire(module_cluster, full)
    make_writable(module_cluster, full)


def assert_others_repaired(
    others: set[int], touching: set[int], node: Child, *, are_first: bool
) -> None:
    """Assert that each other ledger was repaired at the first try.

    ``are_first``: and before every ledger that was sent to the bad bookie.
    """
    spared = {
        event["ledger_id"]
        for event in events(node, "ledger.deferred")
        if event["reason"] == Reason.NO_TARGET.value
    }
    order = [i for i in concluded(node) if i in others | (touching - spared)]
    assert sorted(i for i in order if i in others) == sorted(others)
    if are_first:
        assert set(order[: len(others)]) == others, order


def ids(written: Sequence[Written]) -> set[int]:
    return {each.ledger_id for each in written}


def concluded(node: Child) -> list[int]:
    """Return ledgers in the order in which their repairs ended, completed or deferred."""
    found = [*events(node, "ledger.repaired"), *events(node, "ledger.deferred")]
    return [event["ledger_id"] for event in sorted(found, key=lambda each: each["timestamp"])]


async def write_apart(
    on: Bench, bad: BookieId, *, touching_count: int
) -> tuple[list[Written], list[Written]]:
    """Write ledgers on the bookie, as many as asked for, and others without the bookie."""
    touching: list[Written] = []
    others: list[Written] = []
    while len(touching) < touching_count or len(others) < OTHERS:
        written = await on.write(*(shape(number) for number in range(20)))
        named = set(await on.names(written, bad))
        touching += [each for each in written if each.ledger_id in named]
        others += [each for each in written if each.ledger_id not in named]
    return touching[:touching_count], others[:OTHERS]


async def lose_but(on: Bench, ledger: Written, bad: BookieId, *, number: int) -> None:
    """Lose a copy that is not on that bookie."""
    index = await index_of(on, ledger, bad)
    await on.lose([ledger], index=(index + 1 + number % 2) % 3)


async def index_of(on: Bench, ledger: Written, bookie: BookieId) -> int:
    return (await on.metadata(ledger)).last_segment.ensemble.index(bookie)


class BadBookie(TcpProxy):
    """A proxy in front of a bookie."""

    def __init__(self, on: Bench, bookie: BookieId) -> None:
        super().__init__(port_of(bookie))
        self._store, self._bookie = on.seen.store, bookie
        self._available = f"{on.seen.settings.uri.root}/available"

    async def register(self, *, is_writable: bool) -> None:
        """Register the proxy in place of the bookie."""
        await self._register(self.address, is_writable=is_writable)

    async def step_aside(self) -> None:
        """Register the bookie itself again, with a znode that has no owner."""
        await self._register(self._bookie, is_writable=True)

    async def _register(self, address: str, *, is_writable: bool) -> None:
        host, _, port = address.rpartition(":")
        info = BookieServiceInfoFormat()
        info.endpoints.add(id="bookie", host=host, port=int(port), protocol="bookie-rpc")
        for place in (self._available, f"{self._available}/readonly"):
            with suppress(NoNodeError):
                await self._store.delete(f"{place}/{self._bookie}")
        place = self._available if is_writable else f"{self._available}/readonly"
        await self._store.create(f"{place}/{self._bookie}", info.SerializeToString())


async def get_well(on: Bench, proxy: BadBookie) -> None:
    """End the trouble. Return when all ledgers that waited for the bookie are repaired."""
    proxy.reply_delay_s = 0.0
    proxy.garble = lambda piece: piece
    proxy.restore()
    await proxy.register(is_writable=True)
    await on.wait_idle()


@asynccontextmanager
async def scene(
    cluster: LocalCluster, bad: BookieId, folder: Path
) -> AsyncIterator[tuple[Bench, BadBookie, Callable[[], Child]]]:
    """Yield the bench, the proxy of the bad bookie, and a function that starts our daemon."""
    settings = {
        "AUDITOR_ENABLED": "false",
        "REPLICATION_RETRY_MIN_S": "0.5",
        "REPLICATION_LEDGERS_AT_ONCE": str(SLOTS),
    }
    async with bench(cluster.metadata_service_uri) as on:
        proxy = BadBookie(on, bad)
        await proxy.start()
        try:
            async with nodes(cluster.metadata_service_uri, folder) as start:
                try:
                    yield on, proxy, lambda: start("node", settings=settings)
                finally:  # the next test needs an empty queue, even after a failure
                    await get_well(on, proxy)
        finally:
            await proxy.close()
            await proxy.step_aside()
