"""Batch reads on the bulk path: runs of entries with one request each, and bookies without batch
reads."""

import asyncio
import struct

import pytest

from ledgers.bookies import Answer
from ledgers.bulk.batch_reads import (
    BATCH_BYTES,
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    BATCH_ENTRY_BYTES_MAX,
)
from tests.fake_bookie import EIO, ENOLEDGER, READ_BATCH
from tests.ledgers.bulk_cases import DIGEST, LEDGER_ID, SHORT_TIMEOUT_S, Scene, in_scene


def batch_reply(
    *entries: bytes, request_id: int = 1, code: int = 0, operation: int = READ_BATCH
) -> bytes:
    """Return a reply, by default to the first batch read of a connection."""
    body = b"".join(struct.pack(">i", len(entry)) + entry for entry in entries)
    ids = struct.pack(">iqqq", code, LEDGER_ID, 0, request_id)
    return struct.pack(">iBBH", 32 + len(body), 2, operation, 0) + ids + body


@pytest.mark.compat(
    "TestReplicationWorker.testMultipleLedgerReplicationWithReplicationWorkerBatchRead",
    verdict="better",
    why="consecutive entries are read in batches from every bookie that supports them, without "
    "settings, for any E and W",
)
@in_scene(reads_batches=True)
async def test_runs_of_entries_are_copied_with_few_requests(scene: Scene) -> None:
    scene.fill(range(2_000))

    result = await scene.run(scene.runs(2_000))

    assert result.entry_count == 2_000
    assert len(scene.a.reads_seen) + len(scene.b.reads_seen) < 2_000 / 50
    assert scene.a.connection_count == scene.b.connection_count == 1


@pytest.mark.parametrize("is_large", [False, True], ids=["not consecutive", "large"])
@in_scene(reads_batches=True)
async def test_entries_for_which_batches_are_not_worth_it_are_read_singly(
    scene: Scene, is_large: bool
) -> None:
    scene.fill(range(100))
    transfer = scene.halves(100)
    if is_large:
        transfer = scene.runs(100, entry_bytes_hint=BATCH_ENTRY_BYTES_MAX + 1)

    await scene.run(transfer)

    assert not scene.a.batches_seen


@in_scene(reads_batches=True)
async def test_rule_s10_a_batch_asks_for_a_bounded_amount(scene: Scene) -> None:
    scene.fill(range(3_000))

    await scene.run(scene.runs(3_000, entry_bytes_hint=1))

    assert all(len(ids) <= BATCH_COUNT_MAX for _, ids, _ in scene.a.batches_seen)
    assert {bytes_max for _, _, bytes_max in scene.a.batches_seen} == {BATCH_BYTES_MAX}


@in_scene(reads_batches=True, reads_in_flight_max=3)
async def test_rule_s10_a_batch_is_one_read_with_the_bytes_it_returns(scene: Scene) -> None:
    scene.fill(range(1_000), payload=bytes(1_000))
    await scene.run(scene.runs(100, target=None))  # its answers say what batches bring
    scene.a.may_answer.clear()
    budget = scene.budgets.reads(scene.a.bookie_id)
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.run(scene.runs(1_000, target=None)))
        await scene.until(lambda: scene.a.reads_in_flight == 1)
        scene.a.answer_one()
        await scene.until(lambda: scene.a.reads_in_flight == 3)
        await scene.settle()

        assert budget.count == 3
        assert budget.entry_bytes > 2.5 * BATCH_BYTES
        scene.a.may_answer.set()


@pytest.mark.compat(
    "TestReplicationWorker.testMultipleLedgerReplicationWithReplicationWorkerBatchRead",
    verdict="better",
)
@in_scene(reads_batches=True)
async def test_a_batch_cut_short_continues_where_it_stopped(scene: Scene) -> None:
    scene.fill(range(300), payload=bytes(30_000))

    result = await scene.run(scene.runs(300, entry_bytes_hint=100))

    assert result.entry_count == 300
    first = scene.a.batches_seen[0][1]
    assert len(first) * 30_000 > BATCH_BYTES_MAX


@pytest.mark.parametrize("missing", [0, 7, 99], ids=["the first", "in the middle", "the last"])
@in_scene(reads_batches=True)
async def test_rule_s5_only_an_explicit_answer_makes_an_entry_absent(
    scene: Scene, missing: int
) -> None:
    """The batch ended before this entry."""
    scene.fill(range(100))
    del scene.a.entries[LEDGER_ID, missing]
    scene.a.read_codes[LEDGER_ID, 50] = EIO

    result = await scene.run(
        scene.halves(0, reads={scene.a.bookie_id: range(100)}, entry_bytes_hint=40)
    )

    assert result.failures == {scene.a.bookie_id: {missing: Answer.ABSENT, 50: Answer.UNREADABLE}}
    assert result.entry_count == 98


@in_scene(reads_batches=True)
async def test_entries_of_an_unknown_ledger_are_absent_in_batches(scene: Scene) -> None:
    """A bookie that returned empty may lack millions of entries."""
    scene.a.read_codes = {(LEDGER_ID, n): ENOLEDGER for n in range(400)}

    result = await scene.run(scene.halves(0, reads={scene.a.bookie_id: range(400)}))

    assert result.failures == {scene.a.bookie_id: dict.fromkeys(range(400), Answer.ABSENT)}
    assert len(scene.a.batches_seen) <= 400 / 16


@in_scene(reads_batches=True)
async def test_rule_s7_a_damaged_entry_in_a_batch_is_not_copied(scene: Scene) -> None:
    scene.fill(range(60))
    good = scene.a.entries[LEDGER_ID, 20]
    scene.a.entries[LEDGER_ID, 20] = good[:-1] + b"?"
    scene.a.entries[LEDGER_ID, 21] = scene.a.entries[LEDGER_ID, 22]
    scene.a.entries[LEDGER_ID, 23] = b""

    result = await scene.run(scene.halves(0, reads={scene.a.bookie_id: range(60)}))

    damaged = dict.fromkeys((20, 21, 23), Answer.MISMATCH)
    assert result.failures == {scene.a.bookie_id: damaged}
    assert not {(LEDGER_ID, n) for n in damaged} & set(scene.target.entries)


# --- Bookies that do not know batch reads ---------------------------------------------------------


@in_scene(reads_batches=True)
async def test_a_bookie_that_does_not_know_batches_is_asked_once(scene: Scene) -> None:
    """Afterwards it is read entry by entry."""
    scene.fill(range(500))
    scene.a.knows_batches = scene.b.knows_batches = False

    for _ in range(3):
        result = await scene.run(scene.runs(500))
        assert result.entry_count == 500

    assert len(scene.a.batches_seen) == len(scene.b.batches_seen) == 1
    assert scene.a.connection_count == 2


@in_scene(reads_batches=True)
async def test_many_transfers_survive_the_refusal_of_one_batch(scene: Scene) -> None:
    scene.a.knows_batches = scene.b.knows_batches = False
    for ledger_id in range(20):
        scene.fill(range(30), ledger_id=ledger_id)

    results = await asyncio.gather(
        *(scene.run(scene.runs(30, ledger_id=ledger_id)) for ledger_id in range(20))
    )

    assert [result.entry_count for result in results] == [30] * 20
    assert len(scene.a.batches_seen) == 1, "it is found out with one request"


@pytest.mark.parametrize("occasion", ["registered again", "a while has passed"])
@in_scene(reads_batches=True)
async def test_a_bookie_that_refused_batches_is_asked_again(scene: Scene, occasion: str) -> None:
    scene.fill(range(100))
    scene.a.knows_batches = False
    await scene.run(scene.runs(100, target=None))
    scene.a.knows_batches = True
    if occasion == "registered again":
        scene.bulk.bookie_returned(scene.a.bookie_id)
    else:
        scene.skip(601.0)

    await scene.run(scene.runs(100, target=None))

    assert len(scene.a.batches_seen) > 1


@in_scene(reads_batches=True)
async def test_a_bookie_that_stops_during_its_first_batch_just_fails(scene: Scene) -> None:
    """Its failure is no refusal of batches."""
    scene.fill(range(100))
    scene.a.may_answer.clear()
    running = asyncio.create_task(scene.run(scene.runs(100)))
    await scene.until(lambda: bool(scene.a.batches_seen))

    await scene.a.stop()

    result = await running
    assert set(result.failures[scene.a.bookie_id].values()) == {Answer.UNKNOWN}
    assert result.entry_count == 50
    await scene.a.start()


# --- Bookies that lie -----------------------------------------------------------------------------


def _entry(entry_id: int) -> bytes:
    return DIGEST.pack(ledger_id=LEDGER_ID, entry_id=entry_id, lac=-1, length=1, payload=b"p")


_TOO_LONG = struct.pack(">i", 1_000_000)


@pytest.mark.parametrize(
    ("reply", "good_count"),
    [
        pytest.param(batch_reply(*map(_entry, range(11))), 10, id="more entries than asked"),
        pytest.param(
            batch_reply(_entry(0), _entry(1)[:-4] + _TOO_LONG)[:-4] + _TOO_LONG,
            1,
            id="an entry that is another than it claims",
        ),
        pytest.param(batch_reply(operation=2), 0, id="a reply to something else"),
        pytest.param(batch_reply(_entry(0), code=2), 0, id="an error with entries"),
        pytest.param(batch_reply(request_id=7)[:-1] + b"\x01\x00", 0, id="out of step"),
    ],
)
@in_scene(reads_batches=True, timeout_s=SHORT_TIMEOUT_S)
async def test_a_bookie_that_lies_in_a_batch_proves_nothing(
    scene: Scene, reply: bytes, good_count: int
) -> None:
    scene.fill(range(10))
    scene.a.forged.append(reply)

    result = await scene.run(scene.halves(0, reads={scene.a.bookie_id: range(10)}))

    assert result.entry_count >= good_count
    for entry_id, answer in result.failures.get(scene.a.bookie_id, {}).items():
        assert answer in (Answer.UNKNOWN, Answer.MISMATCH), entry_id


@pytest.mark.compat(
    "G25", verdict="better", why="an entry that a successful batch lacks is unknown"
)
@in_scene(reads_batches=True)
async def test_a_success_code_without_any_entry_proves_nothing(scene: Scene) -> None:
    scene.fill(range(10))
    scene.a.forged.append(batch_reply())

    result = await scene.run(scene.halves(0, reads={scene.a.bookie_id: range(10)}))

    assert result.failures == {scene.a.bookie_id: {0: Answer.UNKNOWN}}
    assert result.entry_count == 9


@in_scene(reads_batches=True)
async def test_late_batches_of_a_cancelled_transfer_are_ignored(scene: Scene) -> None:
    scene.fill(range(60))
    scene.a.may_answer.clear()
    first = asyncio.create_task(scene.run(scene.runs(60)))
    await scene.until(lambda: bool(scene.a.batches_seen))
    first.cancel()
    await asyncio.wait([first])
    assert scene.budgets.reads(scene.a.bookie_id).count == 1, "the bookie is still at work on it"
    scene.a.may_answer.set()

    result = await scene.run(scene.runs(60))

    assert result.entry_count == 60
