"""The bulk path with bookies that work correctly: every entry arrives."""

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import Any, cast

import pytest

from ledgers.bookies import Answer, Transfer
from ledgers.bulk.transfer import has_first_claim
from ledgers.digest import EntryDigest
from ledgers.model import DigestType
from tests.ledgers.bulk_cases import DIGEST, LEDGER_ID, Scene, in_scene
from tests.vectors import cases


@pytest.mark.compat(
    "TestLedgerFragmentReplicationWithMock.testRecoverLedgerFragmentEntrySendRightRequestWithFlag",
    verdict="same",
)
@in_scene()
async def test_adds_carry_only_the_recovery_flag_and_the_ledgers_key(scene: Scene) -> None:
    scene.fill(range(3))

    await scene.run(scene.halves(3))

    assert {(flags, key) for flags, key, _ in scene.target.adds} == {(2, DIGEST.master_key)}


@in_scene()
async def test_an_empty_transfer_makes_no_connection(scene: Scene) -> None:
    result = await scene.run(scene.halves(0))

    assert result.entry_count == 0
    assert scene.a.connection_count == scene.target.connection_count == 0


@pytest.mark.parametrize("digest_type", DigestType)
@in_scene()
async def test_every_digest_type_is_checked(scene: Scene, digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"secret")
    scene.a.put(digest, LEDGER_ID, range(20), b"payload")
    bad = bytearray(scene.a.entries[LEDGER_ID, 5])
    bad[-1] ^= 1
    scene.a.entries[LEDGER_ID, 5] = bytes(bad)
    scene.a.entries[LEDGER_ID, 6] = scene.a.entries[LEDGER_ID, 7]
    scene.a.entries[LEDGER_ID, 8] = scene.a.entries[LEDGER_ID, 8][:31]
    transfer = scene.halves(20, digest=digest, reads={scene.a.bookie_id: range(20)})

    result = await scene.run(transfer)

    expected = {6, 8} if digest_type is DigestType.DUMMY else {5, 6, 8}
    assert result.failures == {scene.a.bookie_id: dict.fromkeys(sorted(expected), Answer.MISMATCH)}
    assert not any((LEDGER_ID, entry_id) in scene.target.entries for entry_id in expected)


_GOLDEN = [case for case in cases("entries") if case["entry_id"] >= 0]


@pytest.mark.parametrize("case", _GOLDEN, ids=itertools.count())
@in_scene()
async def test_entries_written_by_java_are_good(scene: Scene, case: dict[str, str | int]) -> None:
    name = {"MAC": "HMAC"}.get(str(case["digest_type"]), str(case["digest_type"]))
    digest = EntryDigest(DigestType[name], bytes.fromhex(str(case["password"])))
    ledger_id, entry_id = int(case["ledger_id"]), int(case["entry_id"])
    scene.a.entries[ledger_id, entry_id] = bytes.fromhex(str(case["entry"]))
    transfer = Transfer(
        ledger_id=ledger_id,
        digest=digest,
        reads={scene.a.bookie_id: [entry_id]},
        target=scene.target.bookie_id,
    )

    assert (await scene.run(transfer)).entry_count == 1


@pytest.mark.parametrize(
    "payload_bytes",
    [
        pytest.param(0, id="empty"),
        pytest.param(1, id="one byte"),
        pytest.param(4_000, id="usual"),
        pytest.param(128 * 1024 - 64, id="where a frame just fits the shared buffer's part"),
        pytest.param(128 * 1024 - 63, id="where it just does not"),
        pytest.param(600_000, id="longer than the receive buffer"),
        pytest.param(5_242_816, id="the largest that a bookie accepts"),
    ],
)
@in_scene()
async def test_entries_of_every_size_arrive(scene: Scene, payload_bytes: int) -> None:
    count = 4 if payload_bytes > 100_000 else 50
    scene.fill(range(count), payload=os.urandom(payload_bytes))

    result = await scene.run(scene.halves(count, entry_bytes_hint=payload_bytes))

    assert result.entry_count == count
    assert scene.is_at_rest()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split_bytes_max", [1, 7, 29, 100, 5_000])
@in_scene()
async def test_replies_may_be_split_anywhere_and_come_in_any_order(
    scene: Scene, split_bytes_max: int, seed: int
) -> None:
    scene.fill(range(30), payload=b"some payload")
    scene.fill([30, 31], payload=os.urandom(split_bytes_max * 30))
    for number, bookie in enumerate(scene.bookies):
        bookie.restart_random(seed * 10 + number)
        bookie.split_bytes_max = split_bytes_max
        bookie.is_reordering = True

    result = await scene.run(scene.halves(33))

    assert result.failures == {scene.a.bookie_id: {32: Answer.ABSENT}}
    assert scene.is_at_rest()


@in_scene()
async def test_thousands_of_small_transfers_share_the_connections(scene: Scene) -> None:
    ledger_ids = range(1_000, 3_000)
    for ledger_id in ledger_ids:
        scene.fill(range(4), ledger_id=ledger_id)

    async with asyncio.TaskGroup() as group:
        for ledger_id in ledger_ids:
            group.create_task(scene.run(scene.halves(4, ledger_id=ledger_id)))

    assert scene.target.entries == scene.a.entries
    assert [bookie.connection_count for bookie in scene.bookies] == [1, 1, 1]
    assert scene.a.reads_in_flight_peak <= 64
    assert scene.is_at_rest()


@in_scene()
async def test_a_bookie_may_be_source_and_target_at_once(scene: Scene) -> None:
    scene.a.put(DIGEST, 1, range(100))
    scene.b.put(DIGEST, 2, range(100))
    there = scene.halves(
        0, ledger_id=1, reads={scene.a.bookie_id: range(100)}, target=scene.b.bookie_id
    )
    back = scene.halves(
        0, ledger_id=2, reads={scene.b.bookie_id: range(100)}, target=scene.a.bookie_id
    )

    await asyncio.gather(scene.run(there), scene.run(back))

    assert scene.a.entries == scene.b.entries
    assert scene.a.connection_count == 2


@in_scene()
async def test_totals_count_entries_read_and_written(scene: Scene) -> None:
    scene.fill(range(10))
    del scene.a.entries[LEDGER_ID, 4]

    copied = await scene.run(scene.halves(10))
    checked = await scene.run(scene.halves(10, target=None))

    totals = scene.bulk.totals
    assert (totals.entries_read, totals.entries_written) == (18, 9)
    assert totals.written_bytes == copied.entry_bytes
    assert totals.read_bytes == copied.entry_bytes + checked.entry_bytes


# --- Transfers of one ledger share a connection ---------------------------------------------------


@dataclass(slots=True, eq=False)
class Slice:
    first_id: int
    last_id: int


@pytest.mark.parametrize(
    ("before", "own", "is_first"),
    [
        pytest.param([], (0, 9), True, id="alone"),
        pytest.param([(0, 9)], (10, 19), True, id="behind a slice that ends before"),
        pytest.param([(10, 19)], (0, 9), True, id="behind a slice that begins after"),
        pytest.param([(0, 9)], (9, 19), False, id="behind a part with the same entry"),
        pytest.param([(5, 6)], (0, 9), False, id="behind a part with entries in between"),
        pytest.param([(10, 19), (0, 9)], (0, 9), False, id="behind its like and another"),
    ],
)
def test_consecutive_replies_are_handled_together(
    before: list[tuple[int, int]], own: tuple[int, int], is_first: bool
) -> None:
    """If no earlier part waits for them."""
    part = Slice(*own)
    parts = [*(Slice(*ids) for ids in before), part, Slice(*own)]

    assert has_first_claim(cast(Any, parts), cast(Any, part)) is is_first


@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@in_scene("reads_batches")
async def test_slices_and_repeated_checks_get_their_own_replies(
    scene: Scene, reads_batches: bool
) -> None:
    scene.fill(range(900))

    def reads(start: int, stop: int, **options: Any) -> Any:
        ids = range(start, stop)
        return scene.run(scene.halves(0, reads={scene.a.bookie_id: ids}, **options))

    results = await asyncio.gather(
        reads(0, 300),
        reads(300, 600),
        reads(600, 900),
        reads(150, 450, target=None),
        reads(0, 900, target=None),
    )

    assert [result.entry_count for result in results] == [300, 300, 300, 300, 900]
    assert not any(result.failures or result.unwritten for result in results)
