"""The auditor in virtual time: which ledgers it marks after a loss, in which order, and what it
reports.
"""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from auditor import marker
from auditor.auditor import CHANGES_PAUSE_S, RETRY_S
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import read_audit
from auditor.settings import AuditorSettings
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId, LedgerState, Segment
from replication.marks import read_urgent
from tests.auditor.auditing import auditing, leading, running
from tests.auditor.scenes import (
    SOON_S,
    count_audits,
    marked_soon,
    replicas,
    set_delay,
    with_ledgers,
)
from tests.replication.cluster import Cluster, shut_out, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, ROOT, working
from tests.replication.refusing import refuse, writes_below

scene = partial(with_ledgers, (B1, B2))


@pytest.mark.compat("AuditorLedgerCheckerTest.testSimpleLedger", verdict="same")
async def test_the_ledgers_of_a_lost_bookie_are_marked() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with auditing(cluster):
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0, 1]
        assert await replicas(cluster, 0) == (B1,)


async def test_workers_are_told_which_ledgers_are_urgent() -> None:
    """The list of urgent ledgers is empty again once their marks are deleted."""
    cluster = await with_ledgers((B1, B2), (B1, B2, B3), (B1, B3), (B4, B5))
    async with auditing(cluster, settings=AuditorSettings(bookie_check_interval_s=20)):
        await cluster.kill(B1, B3)
        await asyncio.sleep(SOON_S)
        urgent = await read_urgent(cluster.store, PATHS)
        assert set(urgent) == {0, 1, 2}
        assert urgent[-1] == 0, "the others have no copy left of some entries"

        await cluster.revive(B1)
        await cluster.revive(B3)
        await asyncio.sleep(20)
        assert await read_urgent(cluster.store, PATHS) == ()


async def test_bookies_lost_before_the_election_are_found_by_cookie(cluster: Cluster) -> None:
    await cluster.kill(B1)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]


async def test_a_bookie_without_cookie_that_a_ledger_names_is_lost_too() -> None:
    cluster = await with_ledgers((B1, B2), (B3, BookieId("decommissioned:3181")))

    async with auditing(cluster):
        assert await marked_soon(cluster) == [1]


async def test_a_bookie_whose_cookie_was_deleted_is_lost_when_it_stops(cluster: Cluster) -> None:
    await cluster.store.delete(f"{ROOT}/cookies/{B1}")

    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


async def test_a_bookie_that_disappears_with_its_cookie_is_lost(cluster: Cluster) -> None:
    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await set_delay(cluster, 0)  # asks for an audit, after which nothing happens for a while
        assert await marked_soon(cluster) == []
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


async def test_a_read_only_bookie_is_lost_only_once_it_disappears(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.register(B1, is_read_only=True)
        await cluster.store.delete(f"{ROOT}/available/{B1}")
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]


async def test_ledgers_with_the_fewest_copies_are_marked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker, "MARKS_PER_MULTI", 1)
    cluster = await with_ledgers((B1, B3), (B1, B2), (B3, B4))
    await cluster.kill(B1, B2)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]

    assert (await cluster.mark_stat(1)).czxid < (await cluster.mark_stat(0)).czxid
    assert await replicas(cluster, 1) == (B1, B2)


async def test_a_loss_is_handled_once(cluster: Cluster) -> None:
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        audits = count_audits(leader)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        await cluster.register(BookieId("new:3181"))
        await asyncio.sleep(100)

        assert len(audits) == 1


@pytest.mark.compat("AuditorLedgerCheckerTest.testRestartBookie", verdict="same")
async def test_rule_s6_the_return_of_a_bookie_deletes_no_mark(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await cluster.revive(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == [0]


@pytest.mark.compat("AuditorLedgerCheckerTest.testMultipleBookieFailures", verdict="same")
async def test_a_second_loss_marks_a_completed_ledger_again(cluster: Cluster) -> None:
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        await until(cluster, lambda: _is_free_of(cluster, B1))
        assert await cluster.marked() == []

        await cluster.kill(B2)
        await until(cluster, lambda: _is_free_of(cluster, B2))

    await cluster.assert_whole(0)


@pytest.mark.compat(
    "AuditorBookieCheckTaskTest.testAuditBookies",
    verdict="same",
    why="in the record of the last audit, and in bookmender_marks_total",
)
async def test_the_number_of_marked_ledgers_is_logged() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 10, *[(B3, B4)] * 20)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie, count in ((B1, 10), (B3, 20)):
            before = marks_total("lost")
            await cluster.kill(bookie)
            await asyncio.sleep(SOON_S)

            audit = await read_audit(cluster.store, PATHS)
            assert audit is not None
            assert audit.mark_count == count
            assert marks_total("lost") - before == count


def marks_total(cause: str) -> float:
    return REGISTRY.get_sample_value("bookmender_marks_total", {"cause": cause}) or 0.0


async def _is_free_of(cluster: Cluster, bookie: BookieId) -> bool:
    return bookie not in (await cluster.metadata(0)).bookies and not await cluster.marked()


async def test_the_result_of_the_last_audit_is_published() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    path = cluster.manager.path(1)
    _, stat = await cluster.store.get(path)
    await cluster.store.set(path, b"garbage", version=stat.version)

    async with auditing(cluster):
        await marked_soon(cluster)

    found = await read_audit(cluster.store, PATHS)
    assert found is not None
    assert (found.ledger_count, found.unreadable) == (2, (1,))


# --- Ledgers that are created or changed while bookies are lost -----------------------------------


async def add_segment(
    cluster: Cluster, ledger_id: int, *ensemble: BookieId, first_entry_id: int
) -> None:
    """Append a segment, as a writer does that replaces a bookie and continues."""
    cluster.tree.watcher = lambda *_: None
    versioned = await cluster.manager.read(ledger_id)
    segment = Segment(first_entry_id=first_entry_id, ensemble=ensemble)
    segments = (*versioned.metadata.segments, segment)
    await cluster.manager.write(
        ledger_id, replace(versioned.metadata, segments=segments), read_as=versioned
    )


async def test_a_new_ledger_on_a_lost_bookie_is_marked(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await cluster.write_ledger((B1, B3), ledger_id=7)
        assert await marked_soon(cluster) == [0, 7]
        assert await replicas(cluster, 7) == (B1,)


@pytest.mark.compat(
    "AuditorPeriodicBookieCheckTest.testPeriodicBookieCheckInterval",
    verdict="better",
    why="at once, when the ledger appears, instead of at the next periodic check",
)
async def test_a_new_ledger_that_names_an_unknown_bookie_is_marked(cluster: Cluster) -> None:
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B2, BookieId("never-seen:3181")), ledger_id=7)

        assert await marked_soon(cluster) == [7]


@pytest.mark.parametrize("is_older", [True, False], ids=["older than the loss", "created after it"])
async def test_a_marked_ledger_is_not_marked_again_when_it_grows(is_older: bool) -> None:
    cluster = await Cluster.start()
    async with auditing(cluster):
        if not is_older:
            await cluster.kill(B1)
            await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)
        await asyncio.sleep(SOON_S)
        if is_older:
            await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await add_segment(cluster, 0, B3, B2, first_entry_id=10)
        await asyncio.sleep(SOON_S)
        assert (await cluster.mark_stat(0)).version == 0


async def test_a_failed_mark_of_a_new_ledger_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)

        async def fail(*_: object, **__: object) -> bool:
            raise UnavailableError("no answer")

        monkeypatch.setattr(leader.marker, "mark_stream", fail)
        await cluster.write_ledger((B1, B2), ledger_id=7)
        assert await marked_soon(cluster) == []
        monkeypatch.undo()

        await asyncio.sleep(RETRY_S)
        assert await cluster.marked() == [7]


async def test_partial_repairs_cost_the_leader_only_metadata_reads() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 50)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1, B2)
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        for ledger_id in range(50):  # each is repaired in part
            await add_segment(cluster, ledger_id, B4, B2, B3, first_entry_id=10)
        await asyncio.sleep(SOON_S)

        assert leader.store.request_count - before < 60


async def test_a_repaired_ledger_put_on_the_lost_bookie_is_marked(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        cluster.tree.watcher = lambda *_: None
        for ensemble in ((B3, B2), (B1, B2)):
            await cluster.store.delete(PATHS.mark(0)) if B3 in ensemble else None
            versioned = await cluster.manager.read(0)
            (segment,) = versioned.metadata.segments
            segments = (replace(segment, ensemble=ensemble),)
            await cluster.manager.write(
                0, replace(versioned.metadata, segments=segments), read_as=versioned
            )
            await asyncio.sleep(SOON_S)

        assert await cluster.marked() == [0]


async def test_rule_s6_a_ledger_that_changes_under_a_mark_is_marked() -> None:
    """The new version of the mark tells the worker that has the lease."""
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.mark(B1, ledger_id=7)  # by Java's auditor
        before = (await cluster.mark_stat(7)).version

        await cluster.write_ledger((B1, B3), ledger_id=7)
        await asyncio.sleep(SOON_S)

        assert (await cluster.mark_stat(7)).version == before + 1
        assert await replicas(cluster, 7) == (B1,)


async def test_changes_are_marked_once_marking_is_possible_again(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B3), ledger_id=7)
        await asyncio.sleep(10 * CHANGES_PAUSE_S)
        assert await cluster.marked() == [0]

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0, 7]


async def test_a_decommissioned_bookie_is_no_longer_lost() -> None:
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        assert leader.auditor.losses.lost_since_s.keys() == {B1}

        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await asyncio.sleep(SOON_S)

        assert leader.auditor.losses.lost_since_s == {}
        gauge = "bookmender_unregistered_bookies"
        assert REGISTRY.get_sample_value(gauge, {"state": "lost"}) == 0


async def test_a_bookie_without_cookie_is_lost_while_ledgers_name_it(cluster: Cluster) -> None:
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")  # decommissioned, too early
        assert await marked_soon(cluster) == [0]

        await cluster.manager.delete(0, version=0)
        await asyncio.sleep(SOON_S)
        assert leader.auditor.tracker.states.absent_since_s == {}


async def test_all_metadata_is_compared_with_the_bookies_periodically(cluster: Cluster) -> None:
    settings = AuditorSettings(bookie_check_interval_s=100)
    async with auditing(cluster, settings=settings) as leader:
        audits = count_audits(leader)
        await asyncio.sleep(350)

        assert len(audits) == 4
        await cluster.write_ledger((B1, BookieId("gone:3181")), ledger_id=9)
        await asyncio.sleep(101)
        assert await cluster.marked() == [9]


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDelayedAuditWithPeriodicBookieCheck", verdict="same"
)
async def test_a_periodic_check_does_not_shorten_the_recovery_delay(cluster: Cluster) -> None:
    settings = AuditorSettings(bookie_check_interval_s=10, lost_bookie_recovery_delay_s=60)
    async with auditing(cluster, settings=settings):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)

        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


# --- Our znodes with denied access ----------------------------------------------------------------

NOTE = LedgerMapRecord(session_id=1, written_ms=1, is_complete=True, ledger_count=1)
RECORDS = [f"{PATHS.private.directory}/{name}" for name in ("identities", "absences", "losses")]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.rpartition("/")[2])
@pytest.mark.parametrize("is_readable", [False, True], ids=["for reading", "for writing"])
async def test_denied_access_to_the_leaders_records_is_survived(
    path: str, is_readable: bool
) -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.create(path, b'{"version": 1}', with_parents=True)
    async with leading(cluster) as leader:
        refuse(leader.store, writes_below(path), UnauthorizedError)
        if not is_readable:
            shut_out(leader.store, path)
        with capture_logs() as logs:
            async with running(leader.auditor.run()) as auditor:
                await asyncio.sleep(5)
                await cluster.kill(B1)
                assert await marked_soon(cluster) == [0]
                await asyncio.sleep(180)
                assert not auditor.done()
                await cluster.kill(B3)
                assert await marked_soon(cluster) == [0, 1]

    told = [line for line in logs if line["event"] == "record.access_denied"]
    assert {line["path"] for line in told} == {path}


async def test_denied_access_to_the_ledger_map_record_is_survived(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        refuse(leader.store, writes_below(PATHS.ledger_map), UnauthorizedError)

        with capture_logs() as logs:
            await leader.records.write(NOTE)

    assert [line["path"] for line in logs] == [PATHS.ledger_map]


async def test_an_unreadable_disable_switch_counts_as_set(cluster: Cluster) -> None:
    async with auditing(cluster) as leader:
        await asyncio.sleep(5)
        shut_out(leader.store, PATHS.disable)
        await cluster.store.create(PATHS.disable)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        assert await cluster.marked() == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]
