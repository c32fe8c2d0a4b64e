"""Why ledgers are marked: what the leader notes of bookies, and what follows from it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from auditor.findings import (
    CLOCKS_APART_MS,
    KEPT_MAX,
    KEPT_MS,
    Cause,
    Finding,
    MarkReason,
    MarkReasons,
    Why,
    read_causes,
    updated_causes,
)
from ledgers.model import BookieId
from replication.orders import DrainOrder
from replication.znodes import Mark
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed, marked_soon, with_ledgers
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

# --- What is noted of bookies ---------------------------------------------------------------------


def lost(since_ms: int, ended_ms: int | None = None) -> Cause:
    return Cause(why=Why.LOST, since_ms=since_ms, ended_ms=ended_ms)


@pytest.mark.parametrize(
    ("known", "current", "after"),
    [
        pytest.param({}, {B1: lost(5)}, {B1: lost(5)}, id="a new one"),
        pytest.param({B1: lost(5)}, {B1: lost(7)}, {B1: lost(5)}, id="one that goes on"),
        pytest.param({B1: lost(5)}, {}, {B1: lost(5, 100)}, id="one that is over"),
        pytest.param({B1: lost(5, 50)}, {}, {B1: lost(5, 50)}, id="one that was over"),
        pytest.param({B1: lost(5, 50)}, {B1: lost(7)}, {B1: lost(7)}, id="lost once more"),
        pytest.param({B1: lost(5, 100 - KEPT_MS)}, {}, {}, id="over for long"),
        pytest.param(
            {B1: Cause(why=Why.REBORN, since_ms=5)},
            {B1: lost(7)},
            {B1: lost(7)},
            id="another cause",
        ),
    ],
)
def test_causes_are_kept_for_as_long_as_marks_may_stand(
    known: dict[BookieId, Cause], current: dict[BookieId, Cause], after: dict[BookieId, Cause]
) -> None:
    assert updated_causes(known, current, now_ms=100) == after


def test_of_very_many_those_that_go_on_are_kept() -> None:
    known = {BookieId(f"old-{i}:3181"): lost(1, i) for i in range(KEPT_MAX)}

    causes = updated_causes(known, {B1: lost(5)}, now_ms=KEPT_MAX)

    assert len(causes) == KEPT_MAX
    assert B1 in causes
    assert BookieId("old-0:3181") not in causes


@in_virtual_time
async def test_the_leader_notes_since_when_a_bookie_is_lost_and_when_it_was_back() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(30)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        gone_ms = cluster.clock.wall_ms()
        await asyncio.sleep(20)
        assert await read_causes(cluster.store, PATHS) == {}, "it is not lost yet"

        await asyncio.sleep(20)
        assert await read_causes(cluster.store, PATHS) == {B1: lost(gone_ms)}

        await cluster.revive(B1)
        back_ms = cluster.clock.wall_ms()
        await asyncio.sleep(SOON_S)
        assert await read_causes(cluster.store, PATHS) == {B1: lost(gone_ms, back_ms)}


@in_virtual_time
async def test_a_new_leader_keeps_what_was_noted() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, "node-1"):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
    noted = await read_causes(cluster.store, PATHS)
    await asyncio.sleep(100)
    async with auditing(cluster, "node-2"):
        await asyncio.sleep(10)

    assert await read_causes(cluster.store, PATHS) == noted


@in_virtual_time
async def test_a_bookie_that_came_back_empty_is_another_cause() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.wipe(B1)
        await cluster.revive(B1)
        assert await marked_soon(cluster) == [0]

    causes = await read_causes(cluster.store, PATHS)
    assert {b: cause.why for b, cause in causes.items()} == {B1: Why.REBORN}


@in_virtual_time
async def test_bookies_that_are_seen_for_the_first_time_are_no_cause() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(10)

    assert await read_causes(cluster.store, PATHS) == {}


# --- The reason of a mark -------------------------------------------------------------------------

KNOWN = MarkReasons(
    causes={B1: lost(5), B2: lost(6, 9), B3: Cause(why=Why.REBORN, since_ms=7, ended_ms=8)},
    draining={B1: DrainOrder(since_ms=4)},
    findings={
        7: Finding(check="replicas", bookies=(B1,), detail="entry 3 is gone", found_ms=11),
        8: Finding(check="placement", bookies=(), detail="all on one rack", found_ms=12),
    },
)


@pytest.mark.parametrize(
    ("ledger_id", "named", "is_own", "reasons"),
    [
        pytest.param(1, [B1], False, [{"cause": "lost", "bookie": B1, "since_ms": 5}], id="lost"),
        pytest.param(
            1,
            [B2],
            False,
            [{"cause": "lost", "bookie": B2, "since_ms": 6, "detail": "back by now"}],
            id="lost, and back",
        ),
        pytest.param(
            1,
            [B3],
            False,
            [{"cause": "reformatted", "bookie": B3, "since_ms": 7}],
            id="reformatted",
        ),
        pytest.param(
            1,
            [BookieId("other:3181")],
            False,
            [{"cause": "unknown", "bookie": "other:3181", "detail": "marked by another auditor"}],
            id="Java's",
        ),
        pytest.param(1, [], False, [{"cause": "unknown"}], id="names nobody"),
        pytest.param(
            1, [B1], True, [{"cause": "drained", "bookie": B1, "since_ms": 4}], id="drained"
        ),
        pytest.param(
            1,
            [B2],
            True,
            [{"cause": "hand", "bookie": B2, "detail": "or its drain was taken back"}],
            id="by hand, a bookie",
        ),
        pytest.param(1, [], True, [{"cause": "hand"}], id="by hand, a ledger"),
        pytest.param(
            7,
            [B1, B2],
            False,
            [
                {"cause": "replicas", "bookie": B1, "since_ms": 11, "detail": "entry 3 is gone"},
                {"cause": "lost", "bookie": B2, "since_ms": 6, "detail": "back by now"},
            ],
            id="found by a check, and another one lost",
        ),
        pytest.param(
            8,
            [],
            False,
            [{"cause": "placement", "since_ms": 12, "detail": "all on one rack"}],
            id="misplaced",
        ),
    ],
)
def test_the_reason_of_a_mark_follows_from_what_it_names(
    ledger_id: int, named: Sequence[BookieId], is_own: bool, reasons: list[dict[str, Any]]
) -> None:
    mark = Mark(replicas=tuple(named), ctime_ms=8)

    assert KNOWN.of(ledger_id, mark, is_own=is_own) == [MarkReason(**each) for each in reasons]


@pytest.mark.parametrize("why", Why)
@pytest.mark.parametrize(
    ("ended_ms", "ctime_ms", "is_told"),
    [
        pytest.param(None, 900_000, True, id="it goes on"),
        pytest.param(500_000, 499_999, True, id="the mark was made meanwhile"),
        pytest.param(500_000, 50_000, True, id="the mark stood before, for another loss maybe"),
        pytest.param(500_000, 500_000 + CLOCKS_APART_MS, True, id="clocks differ"),
        pytest.param(500_000, 500_001 + CLOCKS_APART_MS, False, id="it was over: Java's mark"),
        pytest.param(500_000, None, True, id="nobody knows when the mark was made"),
    ],
)
def test_a_cause_that_was_over_is_none_of_a_later_mark(
    why: Why, ended_ms: int | None, ctime_ms: int | None, is_told: bool
) -> None:
    reasons = MarkReasons(causes={B1: Cause(why=why, since_ms=100_000, ended_ms=ended_ms)})

    [reason] = reasons.of(1, Mark(replicas=(B1,), ctime_ms=ctime_ms), is_own=False)

    if is_told:
        assert (reason.cause, reason.since_ms) == (why.value, 100_000)
    else:
        assert reason == MarkReason(cause="unknown", bookie=B1, detail="marked by another auditor")


def test_a_mark_that_cannot_be_read_names_nobody() -> None:
    assert KNOWN.of(1, None, is_own=False) == [MarkReason(cause="unknown")]
