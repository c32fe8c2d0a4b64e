"""The check of all ledgers marks nothing that is uncertain."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from auditor.settings import ChecksSettings
from ledgers.errors import (
    BookmenderError,
    BusyError,
    NoAnswerError,
    UnavailableError,
)
from ledgers.model import BookieId
from tests.auditor.checking import (
    LEDGERS,
    asked_of,
    check_each,
    checker,
    five_ledgers,
    look,
    lose_first,
    lose_the_ledger,
)
from tests.auditor.scenes import with_ledgers
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import (
    DIGEST,
    WRONG_DIGEST,
    Cluster,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6
from tests.replication.nodes import PATHS

EVERY = ChecksSettings(all_ledgers_share=1.0)


@pytest.mark.compat("G22", verdict="better")
@pytest.mark.parametrize("error", [NoAnswerError, BusyError, UnavailableError])
async def test_an_unanswered_read_is_unknown_and_never_marked(
    error: type[BookmenderError],
) -> None:
    cluster = await five_ledgers()
    cluster.bookies.fail(B2, Op.READ, Fault(error=error))

    counts = await look(cluster)

    assert counts == {"unknown": LEDGERS}
    assert await cluster.marked() == []


async def test_no_healthy_ledger_is_marked_when_most_reads_time_out() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3), (B4, B5, B6)] * 50)
    number = iter(range(1_000_000))

    def overloaded(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        return Fault(error=UnavailableError) if next(number) % 3 else Fault(reply_delay_s=3.0)

    cluster.bookies.faults = overloaded
    async with checker(cluster, settings=EVERY) as made:
        counts = await check_each(made.all_ledgers, range(100))

    assert counts == {"unknown": 100}
    assert await cluster.marked() == []


async def test_a_missing_entry_counts_although_other_reads_time_out() -> None:
    cluster = await five_ledgers()
    lose_first(cluster)
    number = iter(range(1_000_000))

    def some(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        is_hit = bookie == B2 and next(number) % 2
        return Fault(error=UnavailableError) if is_hit else Fault()

    cluster.bookies.faults = some
    counts = await look(cluster, 3)

    assert counts["marked"] == 1


async def test_a_bookie_that_is_not_registered_is_not_asked() -> None:
    cluster = await five_ledgers()
    await cluster.kill(B2)

    counts = await look(cluster)

    assert counts == {}, "it is the audit's to mark, after the recovery delay"
    assert not asked_of(cluster, B2)


async def test_an_unresponsive_bookie_is_asked_only_sometimes() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 50)
    cluster.bookie(B2).is_down = True

    async with checker(cluster) as made:
        for ledger_id in range(50):
            await check_each(made.all_ledgers, [ledger_id])

    assert sum(asked_of(cluster, B2).values()) <= 4, "of the two entries of fifty ledgers"


async def test_a_read_only_bookie_is_asked_like_any_other() -> None:
    cluster = await five_ledgers()
    await cluster.unregister(B2)
    await cluster.register(B2, is_read_only=True)
    lose_first(cluster)

    assert (await look(cluster))["marked"] == 1


async def after_the_first_read(
    cluster: Cluster, action: Callable[[], Awaitable[None]]
) -> Counter[str]:
    async with checker(cluster) as made:
        task = asyncio.create_task(check_each(made.all_ledgers, [3]))
        await asyncio.sleep(0.5)
        assert not task.done()
        await action()
        return await task


async def test_an_entry_found_by_the_second_read_is_not_marked() -> None:
    cluster = await five_ledgers()
    lose_first(cluster)

    async def restore() -> None:
        cluster.put(3, 0, B2)

    assert await after_the_first_read(cluster, restore) == {}
    assert await cluster.marked() == []


async def test_a_bookie_that_fails_the_second_read_is_unknown() -> None:
    cluster = await five_ledgers()
    lose_first(cluster)

    async def go() -> None:
        cluster.bookie(B2).is_down = True

    assert await after_the_first_read(cluster, go) == {"unknown": 1}
    assert await cluster.marked() == []


@pytest.mark.compat("AuditorPeriodicCheckTest.testPeriodicCheckWhenLedgerDeleted", verdict="same")
async def test_a_ledger_deleted_meanwhile_is_no_finding() -> None:
    cluster = await five_ledgers()
    lose_the_ledger(cluster)

    async def delete() -> None:
        await cluster.manager.delete(3, version=-1)

    assert await after_the_first_read(cluster, delete) == {"deleted": 1}
    assert await look(cluster, 3) == {"deleted": 1}
    assert await cluster.marked() == []


async def test_a_ledger_repaired_meanwhile_is_checked_again() -> None:
    cluster = await five_ledgers()
    lose_the_ledger(cluster)

    async def move() -> None:
        for entry_id in range(10):
            cluster.put(3, entry_id, B4)
        versioned = await cluster.manager.read(3)
        (segment,) = versioned.metadata.segments
        moved = replace(versioned.metadata, segments=(segment.with_bookies({1: B4}),))
        await cluster.manager.write(3, moved, read_as=versioned)

    assert await after_the_first_read(cluster, move) == {}
    assert asked_of(cluster, B4)
    assert await cluster.marked() == []


async def test_if_no_digest_matches_the_configured_key_is_suspected(cluster: Cluster) -> None:
    """The ledger itself is not."""
    for ledger_id, digest in enumerate((WRONG_DIGEST, DIGEST)):
        await cluster.write_ledger(
            (B1, B2),
            ledger_id=ledger_id,
            digest=digest,
            metadata_version=1,
            ack_quorum=2,
            password=None,
            digest_type=None,
        )
    cluster.bookie(B1).corrupt(1, 0)

    counts = await look(cluster, 0, 1)

    assert counts == {"unreadable": 1, "found": 1, "marked": 1}
    assert await cluster.marked(PATHS.private) == [1], "of which other entries fit it"


async def test_a_bookie_that_stops_answering_does_not_prove_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.copy_reader.TRANSFER_ENTRIES_MAX", 4)
    monkeypatch.setattr("replication.copy_reader.UNANSWERED_MAX", 2)
    cluster = await Cluster.start()
    await cluster.write_ledger(
        (B1, B2),
        ledger_id=0,
        digest=WRONG_DIGEST,
        metadata_version=1,
        ack_quorum=2,
        password=None,
        digest_type=None,
    )
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    async with checker(cluster, settings=EVERY) as made:
        counts = await check_each(made.all_ledgers, [0])

    assert counts == {"unreadable": 1}
    assert await cluster.marked(PATHS.private) == []
