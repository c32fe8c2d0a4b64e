"""Batches of the feed: where they begin and end, and what is in them."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from checkpoints.batches import (
    Batch,
    BatchReader,
    ChangesLostError,
    LedgerChange,
    Offset,
    batch_between,
    latest_offset,
    segments_of,
)
from checkpoints.chain import FeedChain, Kind, Segment
from checkpoints.leader_state import FeedSettings
from checkpoints.model import LogId
from ledgers.errors import SettingsError
from tests.checkpoints.feed_cluster import PATHS, FeedCluster
from tests.replication.cluster import in_virtual_time

KNOWN, GONE = LogId(1, 1_000, 0), LogId(1, 2_000, 0)
"""A restored ZooKeeper gives a ledger id twice."""


def offset(checkpoint: int, *, generation: int = 1, log: LogId | None = KNOWN) -> Offset:
    return Offset(generation=generation, checkpoint=checkpoint, log=log)


def chain(generation: int = 1) -> FeedChain:
    log = Segment(ledger_id=1, kind=Kind.LOG, previous_id=0, begun_ms=1_000)
    return FeedChain(is_enabled=True, generation=generation, changed_ms=0, segments=(log,))


def test_an_offset_survives_a_process() -> None:
    stored = json.loads(json.dumps(offset(2**40).to_json()))

    assert stored == {"generation": 1, "checkpoint": 2**40, "log": [1, 1_000, 0]}
    assert Offset.parse(stored) == offset(2**40)
    earlier_release = {"generation": 1, "checkpoint": 5}
    assert Offset.parse(earlier_release) == offset(5, log=None)
    with pytest.raises(SettingsError, match="not an offset"):
        Offset.parse({"index": 3})


@pytest.mark.parametrize(
    ("start", "end", "latest"),
    [
        pytest.param(offset(5), offset(9), offset(9), id="the log goes on"),
        pytest.param(offset(5), offset(5), offset(5), id="nothing new"),
        pytest.param(offset(9), offset(5), offset(9), id="this reader does not know the end yet"),
        pytest.param(offset(9), offset(5, generation=2), offset(5, generation=2), id="a new feed"),
        pytest.param(offset(9, log=GONE), offset(5), offset(5), id="ZooKeeper was restored"),
    ],
)
def test_the_latest_offset_never_goes_back(start: Offset, end: Offset, latest: Offset) -> None:
    assert latest_offset(start, end, chain=chain(end.generation)) == latest


def test_a_batch_lies_between_two_offsets() -> None:
    def batch(start: Offset, end: Offset, *, may_lose: bool = False) -> Batch:
        return batch_between(start, end, may_lose=may_lose, chain=chain(end.generation))

    assert batch(offset(5), offset(9)) == Batch(generation=1, begin=5, end=9)
    assert batch(offset(5), offset(5)).is_empty
    for start, end in (
        (offset(5), offset(9, generation=2)),
        (offset(5, log=GONE), offset(9)),
        (offset(9, log=GONE), offset(5)),
    ):
        with pytest.raises(ChangesLostError, match="the change feed"):
            batch(start, end)
        whole = Batch(generation=end.generation, begin=0, end=end.checkpoint)
        assert batch(start, end, may_lose=True) == whole
    planned_before = (offset(5), offset(9, log=GONE))
    with pytest.raises(ChangesLostError, match="restore of ZooKeeper"):
        batch(*planned_before)
    assert batch(*planned_before, may_lose=True).is_empty


@pytest.mark.parametrize(
    ("begin", "end", "ledgers"),
    [
        pytest.param(10, 30, [1, 2, 3], id="all"),
        pytest.param(20, 30, [2, 3], id="after the first"),
        pytest.param(21, 30, [2, 3], id="begin within a ledger"),
        pytest.param(10, 20, [1], id="up to the first"),
        pytest.param(25, 99, [3], id="in the last"),
    ],
)
def test_only_ledgers_of_the_batch_are_read(begin: int, end: int, ledgers: list[int]) -> None:
    logs = tuple(
        Segment(ledger_id=ledger_id, kind=Kind.LOG, previous_id=previous_id, begun_ms=0)
        for ledger_id, previous_id in ((1, 10), (2, 20), (3, 25))
    )
    chain = FeedChain(is_enabled=True, generation=1, changed_ms=0, segments=logs)

    found = segments_of(chain, Batch(generation=1, begin=begin, end=end))

    assert [each.ledger_id for each in found] == ledgers


def reader(cluster: FeedCluster) -> BatchReader:
    return BatchReader(
        store=cluster.store,
        paths=PATHS,
        manager=cluster.manager,
        bookies=cluster.bookies,
        clock=cluster.clock,
    )


async def changes(
    cluster: FeedCluster, batch: Batch, *, may_lose: bool = False
) -> dict[int, LedgerChange]:
    found: dict[int, LedgerChange] = {}
    async with aclosing(reader(cluster).read(batch, may_lose=may_lose)) as parts:
        async for part in parts:
            for each in part:
                assert each.ledger_id not in found
                found[each.ledger_id] = each
    return found


async def pass_time() -> None:
    await asyncio.sleep(2.0)


@in_virtual_time
async def test_batches_have_every_change_across_leaders_and_log_ledgers() -> None:
    cluster = await FeedCluster.start(settings=FeedSettings(roll_bytes=100))
    first, second = await cluster.create(), await cluster.create()
    await cluster.enable()
    for _ in range(3):
        async with cluster.leader():
            for _ in range(4):
                await pass_time()
                await cluster.change(first)
                third = await cluster.create()
            await cluster.delete(third)
            await pass_time()
    chain = await cluster.chain()
    assert len(chain.logs) > 3
    ids = [each.id for each in await cluster.logged()]

    whole = await changes(cluster, Batch(generation=1, begin=0, end=ids[-1]))
    assert {i for i, each in whole.items() if not each.is_deleted} == cluster.ledgers().keys()
    stat = (await cluster.manager.read(first)).stat
    assert whole[first].version == stat.mzxid
    assert whole[second].version < whole[first].version

    for middle in ids:
        before = await changes(cluster, Batch(generation=1, begin=0, end=middle))
        after = await changes(cluster, Batch(generation=1, begin=middle, end=ids[-1]))
        assert before | after == whole


@in_virtual_time
async def test_a_batch_that_begins_within_a_checkpoint_is_refused_or_read_from_the_begin() -> None:
    """So begin the batches of an earlier release, whose offsets have no log, after a restore."""
    cluster = await FeedCluster.start()
    ledger_ids = {await cluster.create() for _ in range(2)}
    await cluster.enable()
    async with cluster.leader():
        await pass_time()
        await cluster.delete(min(ledger_ids))
        await pass_time()
    first, *_, last = await cluster.logged()
    batch = Batch(generation=1, begin=first.id - 1, end=last.id)

    with pytest.raises(ChangesLostError, match="restore of ZooKeeper"):
        await changes(cluster, batch)
    found = await changes(cluster, batch, may_lose=True)

    assert ledger_ids <= found.keys()
    assert found[min(ledger_ids)].is_deleted


@in_virtual_time
async def test_a_batch_that_the_log_has_lost_is_not_given_in_parts() -> None:
    cluster = await FeedCluster.start()
    ledger_id = await cluster.create()
    async with cluster.leader():
        await cluster.enable()
        await pass_time()
        (log,) = (await cluster.chain()).logs
        end = (await cluster.logged())[-1].id
        batch = Batch(generation=1, begin=log.previous_id - 1, end=end)

        with pytest.raises(ChangesLostError, match="keeps only later changes"):
            await changes(cluster, batch)
        assert ledger_id in await changes(cluster, batch, may_lose=True)

        await cluster.disable()
        await pass_time()
        with pytest.raises(ChangesLostError):
            await changes(cluster, Batch(generation=1, begin=log.previous_id, end=end))
        assert await changes(cluster, batch, may_lose=True) == {}
