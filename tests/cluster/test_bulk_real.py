"""The bulk path between real bookies: copied entries can be read back, byte for byte."""

import asyncio
import itertools
import os
from collections.abc import Sequence

import pytest

from bench.loading import store_entries
from daemon.local.cluster import LocalCluster
from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.digest import EntryDigest
from ledgers.errors import UnauthorizedError
from ledgers.model import BookieId, DigestType

pytestmark = pytest.mark.cluster

_ledger_ids = itertools.count(0x42_0000_0000)
"""Ids far from those that the cluster assigns itself."""


def _pack(digest: EntryDigest, ledger_id: int, payloads: Sequence[bytes]) -> list[bytes]:
    lengths = itertools.accumulate(map(len, payloads))
    return [
        digest.pack(
            ledger_id=ledger_id,
            entry_id=entry_id,
            lac=entry_id - 1,
            length=length,
            payload=payload,
        )
        for entry_id, (payload, length) in enumerate(zip(payloads, lengths, strict=True))
    ]


def _run(*transfers: Transfer) -> list[TransferResult]:
    """Run all transfers concurrently, over connections of their own."""

    async def run() -> list[TransferResult]:
        bulk = BulkTransfers(Budgets(reads_in_flight_max=64))
        try:
            return await asyncio.gather(*map(bulk.transfer, transfers))
        finally:
            await bulk.close()

    return asyncio.run(run())


def _copy(
    digest: EntryDigest,
    ledger_id: int,
    count: int,
    source: BookieId,
    target: BookieId | None = None,
) -> Transfer:
    return Transfer(ledger_id=ledger_id, digest=digest, reads={source: range(count)}, target=target)


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldCopyFailedBookieFragmentsToTargetBookie",
    verdict="better",
    why="copies are byte-identical to what was written",
)
@pytest.mark.parametrize("digest_type", DigestType)
def test_copied_entries_can_be_read_back(cluster: LocalCluster, digest_type: DigestType) -> None:
    source, target = cluster.bookies[:2]
    digest, ledger_id = EntryDigest(digest_type, b"secret"), next(_ledger_ids)
    payloads = [os.urandom(size) for size in (*range(300), 10_000, 70_000, 1_000_000, 0)]
    entries = _pack(digest, ledger_id, payloads)
    store_entries(source, entries, master_key=digest.master_key)

    (copied,) = _run(_copy(digest, ledger_id, len(entries), source, target))
    (found,) = _run(_copy(digest, ledger_id, len(entries) + 1, target))

    weight = sum(map(len, entries))
    assert (copied.entry_count, copied.entry_bytes) == (len(entries), weight)
    assert (found.entry_count, found.entry_bytes) == (len(entries), weight)
    assert found.failures == {target: {len(entries): Answer.ABSENT}}


def test_the_largest_entries_that_a_bookie_accepts_are_copied(cluster: LocalCluster) -> None:
    source, target = cluster.bookies[:2]
    digest, ledger_id = EntryDigest(DigestType.CRC32C, b""), next(_ledger_ids)
    entries = _pack(digest, ledger_id, [bytes(5_242_816)] * 3)
    store_entries(source, entries, master_key=digest.master_key)

    (copied,) = _run(_copy(digest, ledger_id, 3, source, target))
    (found,) = _run(_copy(digest, ledger_id, 3, target))

    assert copied.entry_count == found.entry_count == 3


@pytest.mark.compat("BookieRecoveryUseIOThreadTest.testRecoveryClosedLedger", verdict="same")
def test_many_small_ledgers_are_copied_concurrently(cluster: LocalCluster) -> None:
    sources, target = cluster.bookies[:2], cluster.bookies[2]
    digest = EntryDigest(DigestType.CRC32C, b"")
    ledger_ids = [next(_ledger_ids) for _ in range(200)]
    for source in sources:
        entries = [
            e for ledger_id in ledger_ids for e in _pack(digest, ledger_id, [b"payload"] * 10)
        ]
        store_entries(source, entries, master_key=digest.master_key)

    copied = _run(
        *(
            Transfer(
                ledger_id=ledger_id,
                digest=digest,
                reads={sources[0]: range(0, 10, 2), sources[1]: range(1, 10, 2)},
                target=target,
            )
            for ledger_id in ledger_ids
        )
    )
    found = _run(*(_copy(digest, ledger_id, 10, target) for ledger_id in ledger_ids))

    assert [result.entry_count for result in copied] == [10] * 200
    assert [result.entry_count for result in found] == [10] * 200


def test_a_ledger_that_a_bookie_does_not_know_is_absent(cluster: LocalCluster) -> None:
    digest, ledger_id = EntryDigest(DigestType.CRC32C, b""), next(_ledger_ids)

    (result,) = _run(_copy(digest, ledger_id, 20, cluster.bookies[0], cluster.bookies[1]))

    assert result.failures == {cluster.bookies[0]: dict.fromkeys(range(20), Answer.ABSENT)}
    assert result.target_error is None


def test_a_target_that_knows_another_master_key_refuses(cluster: LocalCluster) -> None:
    source, target = cluster.bookies[:2]
    digest, ledger_id = EntryDigest(DigestType.CRC32C, b"right"), next(_ledger_ids)
    other = EntryDigest(DigestType.CRC32C, b"wrong")
    entries = _pack(digest, ledger_id, [b"payload"] * 10)
    store_entries(source, entries, master_key=digest.master_key)
    store_entries(target, entries[:1], master_key=other.master_key)

    (result,) = _run(_copy(digest, ledger_id, 10, source, target))

    assert isinstance(result.target_error, UnauthorizedError)
    assert result.entry_count == 0
    assert result.unwritten == frozenset(range(10))
