"""Why ledgers are marked: the recorded losses, and the reasons that follow from them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from auditor.mark_reasons import (
    CLOCKS_APART_MS,
    KEPT_MAX,
    KEPT_MS,
    Finding,
    LossKind,
    LossRecord,
    MarkExplainer,
    MarkReason,
    read_losses,
    updated_losses,
)
from ledgers.model import BookieId
from replication.orders import DrainOrder
from replication.znodes import Mark
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed, marked_soon, with_ledgers
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

# --- Records of losses ----------------------------------------------------------------------------


def lost(since_ms: int, ended_ms: int | None = None) -> LossRecord:
    return LossRecord(kind=LossKind.LOST, since_ms=since_ms, ended_ms=ended_ms)


@pytest.mark.parametrize(
    ("known", "current", "after"),
    [
        pytest.param({}, {B1: lost(5)}, {B1: lost(5)}, id="a new loss"),
        pytest.param({B1: lost(5)}, {B1: lost(7)}, {B1: lost(5)}, id="a loss that continues"),
        pytest.param({B1: lost(5)}, {}, {B1: lost(5, 100)}, id="a loss that ends"),
        pytest.param({B1: lost(5, 50)}, {}, {B1: lost(5, 50)}, id="a loss that had ended"),
        pytest.param({B1: lost(5, 50)}, {B1: lost(7)}, {B1: lost(7)}, id="lost once more"),
        pytest.param({B1: lost(5, 100 - KEPT_MS)}, {}, {}, id="over for long"),
        pytest.param(
            {B1: LossRecord(kind=LossKind.REFORMATTED, since_ms=5)},
            {B1: lost(7)},
            {B1: lost(7)},
            id="another cause",
        ),
    ],
)
def test_losses_are_kept_as_long_as_their_marks_may_last(
    known: dict[BookieId, LossRecord],
    current: dict[BookieId, LossRecord],
    after: dict[BookieId, LossRecord],
) -> None:
    assert updated_losses(known, current, now_ms=100) == after


def test_of_very_many_losses_the_current_ones_are_kept() -> None:
    known = {BookieId(f"old-{i}:3181"): lost(1, i) for i in range(KEPT_MAX)}

    causes = updated_losses(known, {B1: lost(5)}, now_ms=KEPT_MAX)

    assert len(causes) == KEPT_MAX
    assert B1 in causes
    assert BookieId("old-0:3181") not in causes


async def test_the_leader_records_when_a_loss_begins_and_ends() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(30)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        gone_ms = cluster.clock.wall_ms()
        await asyncio.sleep(20)
        assert await read_losses(cluster.store, PATHS) == {}, "it is not lost yet"

        await asyncio.sleep(20)
        assert await read_losses(cluster.store, PATHS) == {B1: lost(gone_ms)}

        await cluster.revive(B1)
        back_ms = cluster.clock.wall_ms()
        await asyncio.sleep(SOON_S)
        assert await read_losses(cluster.store, PATHS) == {B1: lost(gone_ms, back_ms)}


async def test_a_reformatted_bookie_is_a_loss_of_another_kind() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.reformat(B1)
        assert await marked_soon(cluster) == [0]

    causes = await read_losses(cluster.store, PATHS)
    assert {b: cause.kind for b, cause in causes.items()} == {B1: LossKind.REFORMATTED}


async def test_bookies_seen_for_the_first_time_are_no_loss() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(10)

    assert await read_losses(cluster.store, PATHS) == {}


# --- The reason of a mark -------------------------------------------------------------------------

KNOWN = MarkExplainer(
    losses={
        B1: lost(5),
        B2: lost(6, 9),
        B3: LossRecord(kind=LossKind.REFORMATTED, since_ms=7, ended_ms=8),
    },
    draining={B1: DrainOrder(since_ms=4)},
    findings={
        7: Finding(check="replicas", bookies=(B1,), detail="entry 3 is gone", found_ms=11),
        8: Finding(check="placement", bookies=(), detail="all on one rack", found_ms=12),
    },
)


@pytest.mark.parametrize(
    ("ledger_id", "named", "is_private", "reasons"),
    [
        pytest.param(1, [B1], False, [{"cause": "lost", "bookie": B1, "since_ms": 5}], id="lost"),
        pytest.param(
            1,
            [B2],
            False,
            [{"cause": "lost", "bookie": B2, "since_ms": 6, "detail": "registered again"}],
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
        pytest.param(1, [], False, [{"cause": "unknown"}], id="names no bookie"),
        pytest.param(
            1, [B1], True, [{"cause": "drained", "bookie": B1, "since_ms": 4}], id="drained"
        ),
        pytest.param(
            1,
            [B2],
            True,
            [{"cause": "hand", "bookie": B2, "detail": "or its drain was cancelled"}],
            id="by hand, a bookie",
        ),
        pytest.param(1, [], True, [{"cause": "hand"}], id="by hand, a ledger"),
        pytest.param(
            7,
            [B1, B2],
            False,
            [
                {"cause": "replicas", "bookie": B1, "since_ms": 11, "detail": "entry 3 is gone"},
                {"cause": "lost", "bookie": B2, "since_ms": 6, "detail": "registered again"},
            ],
            id="found by a check, and another bookie is lost",
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
def test_the_reason_of_a_mark_follows_from_the_bookies_it_names(
    ledger_id: int, named: Sequence[BookieId], is_private: bool, reasons: list[dict[str, Any]]
) -> None:
    mark = Mark(replicas=tuple(named), ctime_ms=8)

    assert KNOWN.explain(ledger_id, mark, is_private=is_private) == [
        MarkReason(**each) for each in reasons
    ]


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize(
    ("ended_ms", "ctime_ms", "is_told"),
    [
        pytest.param(None, 900_000, True, id="the loss continues"),
        pytest.param(500_000, 499_999, True, id="the mark was made meanwhile"),
        pytest.param(500_000, 50_000, True, id="the mark existed before, perhaps for another loss"),
        pytest.param(500_000, 500_000 + CLOCKS_APART_MS, True, id="clocks differ"),
        pytest.param(500_000, 500_001 + CLOCKS_APART_MS, False, id="it was over: Java's mark"),
        pytest.param(500_000, None, True, id="the time of the mark is unknown"),
    ],
)
def test_a_loss_that_ended_does_not_explain_a_later_mark(
    kind: LossKind, ended_ms: int | None, ctime_ms: int | None, is_told: bool
) -> None:
    reasons = MarkExplainer(losses={B1: LossRecord(kind=kind, since_ms=100_000, ended_ms=ended_ms)})

    [reason] = reasons.explain(1, Mark(replicas=(B1,), ctime_ms=ctime_ms), is_private=False)

    if is_told:
        assert (reason.cause, reason.since_ms) == (kind.value, 100_000)
    else:
        assert reason == MarkReason(cause="unknown", bookie=B1, detail="marked by another auditor")


def test_an_unreadable_mark_names_no_bookie() -> None:
    assert KNOWN.explain(1, None, is_private=False) == [MarkReason(cause="unknown")]
