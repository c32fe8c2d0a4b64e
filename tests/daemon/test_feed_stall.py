"""When ``status`` and ``feed status`` show that the change feed is stalled."""

from dataclasses import replace

import pytest
from msgspec import structs

from checkpoints.chain import RETENTION_DEFAULT_S
from checkpoints.stalls import FeedStateRecord, StallReason
from daemon.operations.feed import JAVA_LEADS, FeedStall, FeedStatus, read_stall
from tests.checkpoints.feed_cluster import PATHS, FeedCluster
from tests.memory.store import MemoryStore
from tests.replication.cluster import in_virtual_time

STATE = FeedStateRecord(
    session_id=5,
    written_ms=0,
    stalled_since_ms=0,
    reason=StallReason.WRITE_FAILED,
    detail="no bookie is writable",
)


async def stall_of(
    store: MemoryStore, *, leader: int | None = 5, is_java: bool = False
) -> FeedStall | None:
    return await read_stall(store, PATHS, leader_session_id=leader, is_java_leader=is_java)


@in_virtual_time
async def test_a_stall_is_what_the_present_leader_says_of_an_enabled_feed() -> None:
    cluster = await FeedCluster.start()
    await cluster.store.create(PATHS.feed_state, STATE.to_json(), with_parents=True)
    assert await stall_of(cluster.store) is None, "the feed is not enabled"

    await cluster.enable()

    assert await stall_of(cluster.store) == FeedStall.of(STATE)
    assert await stall_of(cluster.store, leader=6) is None, "an earlier leader wrote it"
    assert await stall_of(cluster.store, leader=None) is None
    assert await stall_of(cluster.store, leader=7, is_java=True) == FeedStall(reason=JAVA_LEADS)
    goes_on = replace(STATE, stalled_since_ms=None, reason=None)
    await cluster.store.set(PATHS.feed_state, goes_on.to_json(), version=-1)
    assert await stall_of(cluster.store) is None


def test_feed_status_shows_the_stall_and_a_loss() -> None:
    state = FeedStatus(
        is_enabled=True,
        retention_s=RETENTION_DEFAULT_S,
        leader="host-a",
        stall=FeedStall.of(STATE),
        begun_again_ms=1,
        lost_ledger=7,
    )

    text = state.to_text(now_ms=300_000)

    assert (
        "has published nothing for 5 min: its ledgers cannot be written or read: no bookie" in text
    )
    assert "Start absent bookies" in text
    assert "its ledger 7 was lost" in text
    restored = structs.replace(state, lost_ledger=None)
    assert "because ZooKeeper was restored from a backup" in restored.to_text(now_ms=300_000)


@pytest.mark.parametrize("error", ["", "no bookie is writable"])
def test_an_error_is_part_of_the_fact(error: str) -> None:
    fact = FeedStall.of(replace(STATE, detail=error)).fact(now_ms=0)

    assert (": no bookie is writable." in fact) is bool(error)
