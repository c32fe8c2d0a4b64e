"""Fingerprints of entries: what makes two copies equal, and how the bulk path collects them."""

import asyncio

import pytest

from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.digest import NO_FINGERPRINT, EntryDigest, Fingerprints
from ledgers.model import BookieId, DigestType
from tests.fake_bookie import FakeBookie
from tests.ledgers.bulk_cases import DIGEST, LEDGER_ID, Scene, in_scene
from tests.memory.bookies import MemoryBookies
from tests.virtual_time import LoopClock, run

by_digest = pytest.mark.parametrize("digest_type", DigestType)
by_reads = pytest.mark.parametrize("reads_batches", [False, True], ids=["single", "batch"])


def digest_of(digest_type: DigestType) -> EntryDigest:
    return EntryDigest(digest_type, b"secret")


def fingerprint_of(
    digest: EntryDigest, *, lac: int = 4, length: int = 60, payload: bytes = b"payload"
) -> int:
    entry = digest.pack(ledger_id=1, entry_id=5, lac=lac, length=length, payload=payload)
    found = Fingerprints(3, 9)
    found.add(entry, digest_bytes=digest.size)
    return found.of(5)


@by_digest
def test_neither_the_lac_nor_the_digest_counts(digest_type: DigestType) -> None:
    digest = digest_of(digest_type)

    assert fingerprint_of(digest, lac=-1) == fingerprint_of(digest) != NO_FINGERPRINT


@by_digest
def test_payload_and_length_count(digest_type: DigestType) -> None:
    digest = digest_of(digest_type)

    assert fingerprint_of(digest, payload=b"Payload") != fingerprint_of(digest)
    assert fingerprint_of(digest, length=61) != fingerprint_of(digest)


@by_reads
@by_digest
@in_scene("reads_batches")
async def test_a_transfer_collects_them_of_every_good_copy(
    scene: Scene, digest_type: DigestType, reads_batches: bool
) -> None:
    digest = digest_of(digest_type)

    for source in (scene.a, scene.b):
        source.put(digest, LEDGER_ID, range(300), b"x")
    del scene.a.entries[LEDGER_ID, 17]
    scene.b.put(digest, LEDGER_ID, [18], b"y")

    result = await transfer(scene, range(10, 300), digest)

    of_a, of_b = (result.fingerprints[each.bookie_id] for each in (scene.a, scene.b))
    assert result.failures == {scene.a.bookie_id: {17: Answer.ABSENT}}
    assert {e for e in range(10, 300) if of_a.of(e) != of_b.of(e)} == {17, 18}
    assert of_a.of(17) == NO_FINGERPRINT
    assert of_b.of(299) == of_memory(digest, scene.b, 299)


@in_scene(reads_batches=True)
async def test_they_are_complete_when_a_bookie_refuses_batches(scene: Scene) -> None:
    scene.fill(range(300))
    scene.a.knows_batches = False

    result = await transfer(scene, range(300), DIGEST)

    found = result.fingerprints[scene.a.bookie_id]
    assert found.values == result.fingerprints[scene.b.bookie_id].values
    assert NO_FINGERPRINT not in found.values


@by_digest
def test_bookies_in_memory_collect_the_same(digest_type: DigestType) -> None:
    digest, bookie = digest_of(digest_type), BookieId("b1:3181")
    entry = digest.pack(ledger_id=1, entry_id=5, lac=4, length=60, payload=b"payload")

    async def scenario() -> int:
        bookies = MemoryBookies([bookie], clock=LoopClock())
        await bookies.add(bookie, entry, master_key=digest.master_key)
        result = await bookies.transfer(
            Transfer(ledger_id=1, digest=digest, reads={bookie: [4, 5]}, takes_fingerprints=True)
        )
        return result.fingerprints[bookie].of(5)

    assert run(scenario()) == fingerprint_of(digest)


async def transfer(scene: Scene, entry_ids: range, digest: EntryDigest) -> TransferResult:
    """Read the same entries from both sources."""
    both = dict.fromkeys((scene.a.bookie_id, scene.b.bookie_id), entry_ids)
    async with asyncio.timeout(30):
        return await scene.bulk.transfer(
            Transfer(ledger_id=LEDGER_ID, digest=digest, reads=both, takes_fingerprints=True)
        )


def of_memory(digest: EntryDigest, bookie: FakeBookie, entry_id: int) -> int:
    """Return the fingerprint computed from the bytes that the bookie stores."""
    found = Fingerprints(entry_id, entry_id)
    found.add(bookie.entries[LEDGER_ID, entry_id], digest_bytes=digest.size)
    return found.of(entry_id)
