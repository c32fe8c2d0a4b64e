"""The check of all ledgers: what it reads, finds and marks, and that nothing stops it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from auditor.checks.records import ALL_LEDGERS, LOGGED_MAX
from auditor.mark_reasons import read_findings
from auditor.settings import ChecksSettings
from ledgers.bookies import Transfer
from ledgers.errors import (
    BookmenderError,
    BusyError,
    NoAnswerError,
    UnavailableError,
    UnreadableError,
)
from ledgers.model import BookieId, LedgerState
from tests.auditor.checking import (
    LEDGERS,
    asked_of,
    check_each,
    checked_at_ms,
    checker,
    five_ledgers,
    last_run,
    look,
    lose_first,
    lose_the_ledger,
    running,
)
from tests.auditor.scenes import replicas, with_ledgers
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import DIGEST, WRONG_DIGEST, Cluster, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6
from tests.replication.nodes import PATHS, working

EVERY = ChecksSettings(all_ledgers_share=1.0)


@pytest.mark.compat("AuditorCheckAllLedgersTaskTest.testCheckAllLedgers", verdict="same")
async def test_healthy_ledgers_are_all_checked_and_none_is_marked() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 10)

    async with checker(cluster) as made:
        made.runs(made.all_ledgers)
        async with running(made):
            await asyncio.sleep(10)

    last = await last_run(cluster, ALL_LEDGERS)
    assert (last.ledger_count, last.counts) == (10, {})
    assert await checked_at_ms(cluster, ALL_LEDGERS) == last.finished_ms
    assert await cluster.marked() == []


Harm = Callable[[Cluster], None]


def damage_last(cluster: Cluster) -> None:
    cluster.bookie(B2).corrupt(3, 9 if 9 in cluster.bookie(B2).entry_ids(3) else 8)


def break_disk(cluster: Cluster) -> None:
    def faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        is_hit = (bookie, op, ledger_id) == (B2, Op.READ, 3)
        return Fault(error=UnreadableError) if is_hit else Fault()

    cluster.bookies.faults = faults


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        pytest.param(lose_first, "b2:3181 lacks entry 0", id="an entry is missing"),
        pytest.param(
            lose_the_ledger, "b2:3181 lacks 2 of the entries 0 to 9", id="the ledger is missing"
        ),
        pytest.param(
            damage_last,
            "b2:3181 holds damaged entry 9",
            marks=pytest.mark.compat("G12", verdict="better", why="digests are verified"),
            id="an entry is damaged",
        ),
        pytest.param(break_disk, "b2:3181 cannot read 2 of the entries 0 to 9", id="its disk is"),
    ],
)
async def test_a_missing_copy_is_marked_with_bookie_and_reason(harm: Harm, what: str) -> None:
    cluster = await five_ledgers()
    harm(cluster)

    counts = await look(cluster)

    assert counts == {"found": 1, "marked": 1}
    paths = PATHS.private if harm is damage_last else PATHS  # of which Java's workers know nothing
    assert await cluster.marked(paths) == [3]
    assert await replicas(cluster, 3, paths) == (B2,)
    finding = (await read_findings(cluster.store, PATHS, [3]))[3]
    assert (finding.check, finding.bookies, finding.detail) == ("all-ledgers", (B2,), what)


async def test_very_many_findings_are_all_marked_and_some_are_logged() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 50)
    for ledger_id in range(50):
        cluster.bookie(B1).lose(ledger_id, 0)

    async with checker(cluster) as made:
        with capture_logs() as logs:
            counts = await check_each(made.all_ledgers, range(50))

    assert counts["marked"] == 50
    assert sum(entry["event"] == "check.found" for entry in logs) == LOGGED_MAX


async def test_a_repeated_finding_changes_nothing() -> None:
    cluster = await five_ledgers()
    lose_first(cluster)
    await look(cluster)

    counts = await look(cluster)

    assert counts == {"found": 1}
    assert await replicas(cluster, 3) == (B2,)


@pytest.mark.parametrize(
    ("share", "is_found"),
    [
        pytest.param(0.0, False, id="the first and the last entry alone"),
        pytest.param(1.0, True, id="every entry"),
    ],
)
@pytest.mark.compat("G12", verdict="better")
async def test_damage_between_the_ends_is_found_by_a_sample(share: float, is_found: bool) -> None:
    cluster = await five_ledgers()
    middle = sorted(cluster.bookie(B2).entry_ids(3))[2]
    cluster.bookie(B2).corrupt(3, middle)

    await look(cluster, settings=ChecksSettings(all_ledgers_share=share))

    assert await cluster.marked(PATHS.private) == ([3] if is_found else [])


async def test_a_sample_reads_its_share_of_each_copy_once(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, last=99)

    await look(cluster, 0, settings=ChecksSettings(all_ledgers_share=0.25))

    asked = asked_of(cluster, B1)
    assert max(asked.values()) == 1
    assert len(asked) == pytest.approx(25, abs=3)
    assert {(0, 0), (0, 99)} <= asked.keys()


@pytest.mark.compat(
    "G8", verdict="better", why="no bookie has the entry, so the ledger is marked and reported"
)
async def test_the_missing_only_entry_of_a_closed_ledger_is_found(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, last=0)
    for bookie in (B1, B2):
        cluster.bookie(bookie).lose(0, 0)

    counts = await look(cluster, 0)

    assert counts["found"] == 1
    assert await replicas(cluster, 0) == (B1, B2)


@pytest.mark.compat("G23", verdict="better")
async def test_the_mark_names_all_bookies_that_lack_something(cluster: Cluster) -> None:
    ensemble = (B1, B2, B3, B4, B5, B6)
    await cluster.write_ledger(ensemble, ledger_id=0)
    for bookie in ensemble:
        cluster.bookie(bookie)._ledgers.pop(0)

    await look(cluster, 0)

    assert await replicas(cluster, 0) == ensemble


async def test_closed_fragments_of_an_open_ledger_are_checked(cluster: Cluster) -> None:
    """The open fragment is not."""
    await cluster.write_ledger(
        (B1, B2), (B3, B4), starts=(0, 5), ledger_id=0, state=LedgerState.OPEN
    )
    cluster.bookie(B1).lose(0, 0)
    cluster.bookie(B3).lose(0, 5)

    counts = await look(cluster, 0)

    assert counts["found"] == 1
    assert await replicas(cluster, 0) == (B1,)
    assert not asked_of(cluster, B3)
    assert (await cluster.metadata(0)).state is LedgerState.OPEN


async def test_a_ledger_whose_copies_are_being_written_is_not_read(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)

    assert await look(cluster, 0) == {}
    assert cluster.bookies.transfers == []


@pytest.mark.compat("AuditorPeriodicCheckTest.testGetLedgerFromZookeeperThrottled", verdict="same")
async def test_shards_smaller_than_the_cluster_cover_all_of_it() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 30)
    cluster.bookie(B1).lose(29, 0)

    async with checker(cluster) as made:
        made.all_ledgers.part_size = 10
        made.runs(made.all_ledgers)
        async with running(made):
            await asyncio.sleep(30)

    last = await last_run(cluster, ALL_LEDGERS)
    assert last.ledger_count == 30
    assert await cluster.marked() == [29]


@pytest.mark.compat("G5", verdict="better", why="the ledger is counted, and the check continues")
async def test_a_ledger_that_cannot_be_opened_is_counted_and_skipped() -> None:
    cluster = await five_ledgers()
    await cluster.store.set(
        cluster.manager.path(1), b"BookieMetadataFormatVersion\t3\n\xff", version=-1
    )
    cluster.bookie(B2).lose(4, sorted(cluster.bookie(B2).entry_ids(4))[0])

    async with checker(cluster) as made:
        made.runs(made.all_ledgers)
        async with running(made):
            await asyncio.sleep(10)

    last = await last_run(cluster, ALL_LEDGERS)
    assert last.counts == {"unreadable": 1, "found": 1, "marked": 1}
    assert await checked_at_ms(cluster, ALL_LEDGERS) is not None
    assert await cluster.marked() == [4]


async def test_very_large_ledgers_are_checked_a_few_at_a_time(cluster: Cluster) -> None:
    for ledger_id in range(20):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=1_200)
    at_once: set[int] = set()
    most = 0

    async def begin(transfer: Transfer) -> None:
        nonlocal most
        at_once.add(transfer.ledger_id)
        most = max(most, len(at_once))

    async def end(transfer: Transfer) -> None:
        at_once.discard(transfer.ledger_id)

    cluster.bookies.before_transfer, cluster.bookies.after_transfer = begin, end
    async with checker(cluster, settings=EVERY) as made:
        counts = await check_each(made.all_ledgers, range(20))

    assert counts == {}
    assert 1 < most <= 8


@pytest.mark.compat("AuditorPeriodicCheckTest.testFailedWriteRecovery", verdict="same")
async def test_a_bookie_that_never_stored_the_entries_is_replaced(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, ack_quorum=1)
    cluster.bookie(B2)._ledgers.pop(0)
    cluster.bookie(B2).is_read_only = True

    assert (await look(cluster, 0))["marked"] == 1
    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    (ensemble,) = await cluster.ensembles(0)
    assert ensemble[0] == B1
    assert ensemble[1] != B2
    assert not cluster.violations


# --- The check of all ledgers marks nothing that is uncertain -------------------------------------


@pytest.mark.compat("G22", verdict="better")
@pytest.mark.parametrize("error", [NoAnswerError, BusyError, UnavailableError])
async def test_an_unanswered_read_is_unknown_and_never_marked(error: type[BookmenderError]) -> None:
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
    await cluster.register_again(B2, is_read_only=True)
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
