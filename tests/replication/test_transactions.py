"""The batcher of transactions: shared packets, conflicts, the guard, and lost replies."""

import asyncio
from collections.abc import Iterator

import pytest

from ledgers.errors import NodeExistsError, RejectedError, SessionLostError, UnknownOutcomeError
from ledgers.store import REQUEST_BYTES_MAX, Check, Create, MultiFailed
from replication.transactions import (
    BATCH_BYTES_MAX,
    BATCH_TRANSACTIONS_MAX,
    SENDER_COUNT,
    Batcher,
    Guard,
    WithdrawnError,
)
from tests.memory.store import Fault, MemoryStore, MemoryTree

GUARD = Guard(check=Check(path="/guard"), error=SessionLostError)


@pytest.fixture
def store(virtual_runner: asyncio.Runner) -> MemoryStore:
    """A session whose guard exists."""
    made = MemoryStore(MemoryTree())
    virtual_runner.run(made.create("/guard", is_ephemeral=True))
    return made


@pytest.fixture
def batcher(virtual_runner: asyncio.Runner, store: MemoryStore) -> Iterator[Batcher]:
    batcher = Batcher(store, [GUARD])
    sender = virtual_runner.get_loop().create_task(batcher.run())
    yield batcher
    sender.cancel()


async def test_transactions_that_are_ready_together_share_a_packet(
    store: MemoryStore, batcher: Batcher
) -> None:
    before = store.request_count

    await asyncio.gather(*(batcher.commit([Create(path=f"/n{i}")]) for i in range(100)))

    assert len(await store.children("/")) == 101
    assert store.request_count - before <= 100 / BATCH_TRANSACTIONS_MAX + SENDER_COUNT + 1


async def test_transactions_share_a_packet_while_a_batcher_lingers(
    store: MemoryStore, batcher: Batcher
) -> None:
    batcher.linger_s = 1.0
    before, begun_s = store.request_count, asyncio.get_running_loop().time()

    async def commit(number: int) -> None:
        await asyncio.sleep(number / 20)
        await batcher.commit([Create(path=f"/n{number}")])

    await asyncio.gather(*(commit(number) for number in range(10)))

    assert store.request_count - before == 1
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(1.0, abs=0.01)


async def test_a_full_batch_does_not_linger(store: MemoryStore, batcher: Batcher) -> None:
    batcher.linger_s = 1.0
    begun_s = asyncio.get_running_loop().time()

    await asyncio.gather(
        *(batcher.commit([Create(path=f"/n{i}")]) for i in range(BATCH_TRANSACTIONS_MAX))
    )

    assert asyncio.get_running_loop().time() - begun_s < 0.5


async def test_rule_s14_a_conflict_in_a_batch_affects_only_its_owner(
    store: MemoryStore, batcher: Batcher
) -> None:
    await store.create("/n3")
    commits = [
        batcher.commit([Create(path=f"/n{i}"), Create(path=f"/n{i}/child")]) for i in range(5)
    ]

    results = await asyncio.gather(*commits, return_exceptions=True)

    failure = results.pop(3)
    assert isinstance(failure, MultiFailed)
    assert (failure.index, type(failure.cause)) == (0, NodeExistsError)
    assert results == [[f"/n{i}", f"/n{i}/child"] for i in (0, 1, 2, 4)]


@pytest.mark.parametrize("conflict_count", [1, 3, BATCH_TRANSACTIONS_MAX])
async def test_rule_s14_each_conflict_in_a_batch_costs_one_request(
    store: MemoryStore, batcher: Batcher, conflict_count: int
) -> None:
    for number in range(conflict_count):
        await store.create(f"/n{number}")
    commits = [batcher.commit([Create(path=f"/n{i}")]) for i in range(BATCH_TRANSACTIONS_MAX)]
    before = store.request_count

    results = await asyncio.gather(*commits, return_exceptions=True)

    failed = [result for result in results if isinstance(result, MultiFailed)]
    assert len(failed) == conflict_count
    rest = conflict_count < BATCH_TRANSACTIONS_MAX
    assert store.request_count - before == conflict_count + rest


async def test_a_transaction_not_wanted_any_more_is_never_sent(
    store: MemoryStore, batcher: Batcher
) -> None:
    """The caller is asked again just before its turn."""
    await store.create("/n0")
    is_wanted = True

    def change_mind() -> bool:
        nonlocal is_wanted
        was_wanted, is_wanted = is_wanted, False
        return was_wanted

    results = await asyncio.gather(
        batcher.commit([Create(path="/n0")]),
        batcher.commit([Create(path="/never")], is_wanted=lambda: False),
        batcher.commit([Create(path="/not-again")], is_wanted=change_mind),
        batcher.commit([Create(path="/n1")]),
        return_exceptions=True,
    )

    assert [type(result) for result in results] == [
        MultiFailed,
        WithdrawnError,
        WithdrawnError,
        list,
    ]
    assert await store.children("/") == ["guard", "n0", "n1"]


async def test_rule_s14_a_multi_stays_below_its_bound_in_bytes(
    store: MemoryStore, batcher: Batcher
) -> None:
    before = store.request_count
    data = bytes(BATCH_BYTES_MAX // 2)

    await asyncio.gather(*(batcher.commit([Create(path=f"/n{i}", data=data)]) for i in range(6)))

    assert store.request_count - before == 6


async def test_rule_s3_nothing_is_written_once_the_guard_is_deleted(
    store: MemoryStore, batcher: Batcher
) -> None:
    await store.delete("/guard")

    with pytest.raises(SessionLostError):
        await batcher.commit([Create(path="/n")])

    assert await store.exists("/n") is None


async def test_a_transaction_cancelled_while_it_waited_is_not_sent(
    store: MemoryStore, batcher: Batcher
) -> None:
    waiting = asyncio.create_task(batcher.commit([Create(path="/cancelled")]))
    await asyncio.sleep(0)
    waiting.cancel()

    await batcher.commit([Create(path="/n")])

    assert await store.children("/") == ["guard", "n"]


async def test_stopping_fails_waiting_transactions() -> None:
    batcher = Batcher(MemoryStore(MemoryTree()), [GUARD])
    sender = asyncio.create_task(batcher.run())
    waiting = asyncio.create_task(batcher.commit([Create(path="/n")]))
    await asyncio.sleep(0)
    sender.cancel()

    with pytest.raises(SessionLostError):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await sender


async def test_stopping_fails_sent_and_resent_transactions() -> None:
    async def far_away() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    store = MemoryStore(MemoryTree(latency=far_away))
    await store.create("/guard", is_ephemeral=True)
    await store.create("/n0")
    batcher = Batcher(store, [GUARD])
    sender = asyncio.create_task(batcher.run())
    commits = [asyncio.create_task(batcher.commit([Create(path=f"/n{i}")])) for i in range(9)]
    with pytest.raises(MultiFailed):
        await commits[0]  # and so the others are being sent again
    sender.cancel()

    results = await asyncio.gather(*commits[1:], return_exceptions=True)

    assert [type(result) for result in results] == [SessionLostError] * 8


async def test_apply_raises_the_error_of_its_own_operation(
    store: MemoryStore, batcher: Batcher
) -> None:
    await store.create("/taken")

    with pytest.raises(NodeExistsError):
        await batcher.apply(Create(path="/n"), Create(path="/taken"))
    assert await store.exists("/n") is None

    await store.delete("/guard")
    with pytest.raises(SessionLostError):
        await batcher.apply(Create(path="/n"))


async def test_put_creates_or_overwrites_a_znode(store: MemoryStore, batcher: Batcher) -> None:
    for data in (b"first", b"second"):
        await batcher.put("/record", data)
        assert (await store.get("/record"))[0] == data

    await store.delete("/record")
    await batcher.put("/record", b"third")
    assert (await store.get("/record"))[0] == b"third"


async def test_after_a_lost_reply_all_in_the_batch_are_unknown(
    store: MemoryStore, batcher: Batcher
) -> None:
    """The transactions behind the batch are written."""
    faults = [Fault.LOST_REPLY]
    store._tree.faults = lambda asking, operations: faults.pop() if faults else None

    results = await asyncio.gather(
        *(batcher.commit([Create(path=f"/n{i}")]) for i in range(3)), return_exceptions=True
    )

    assert all(isinstance(result, UnknownOutcomeError) for result in results)
    assert await batcher.commit([Create(path="/next")]) == ["/next"]


async def test_a_transaction_that_no_server_accepts_fails_alone(
    store: MemoryStore, batcher: Batcher
) -> None:
    too_large = Create(path="/large", data=bytes(REQUEST_BYTES_MAX))

    results = await asyncio.gather(
        batcher.commit([too_large]), batcher.commit([Create(path="/n")]), return_exceptions=True
    )

    assert isinstance(results[0], RejectedError)
    assert results[1] == ["/n"]
