"""Metadata put back from the journal: under the lock, on the bytes that the record left, and undoable."""

import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from ledgers.errors import ConflictError, NoSuchLedgerError, UnavailableError
from ledgers.formats.layout import Layout
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.memory.store import MemoryStore
from ledgers.metadata import LedgerState
from ledgers.registration import Registration
from ledgers.store import Delete, Operation, SetData
from replication.cluster.cluster_view import ViewSource
from replication.cluster.membership import Membership
from replication.cluster.order_book import OrderBook
from replication.cluster.own_state import own_path, waiting_path
from replication.journal import JournalRecord
from replication.planning.survey import Surveyor
from replication.queue import payloads
from replication.queue.listing import marked_ledger_ids
from replication.restoring import Restorer, RestoreRefusedError, Restoring
from tests.replication.cluster import DIGEST, Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, ROOT, UR, node_info, working
from tests.replication.repairs import drain, keep_away, repair, touch

OWN = own_path(UR)
HERE = "the cluster's instance id"


class Undoing:
    """A cluster whose repairs are recorded, and an operator's session that undoes them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.records: list[JournalRecord] = []
        self.store = MemoryStore(cluster.tree)
        self.manager = LedgerManager(
            self.store, root=ROOT, layout=Layout.HIERARCHICAL, journal=self.journal
        )

    def journal(self, ledger_id: int, before: bytes, after: bytes) -> None:
        self.records.append(
            JournalRecord(
                time_ms=len(self.records),
                ledger_id=ledger_id,
                before=before,
                after=after,
                cluster=HERE,
            )
        )

    async def restorer(self) -> Restorer:
        views = ViewSource(
            Registration(self.store, ROOT), self.cluster.clock, OrderBook(self.store, UR)
        )
        return Restorer(
            store=self.store,
            manager=self.manager,
            surveyor=Surveyor(
                manager=self.manager,
                bookies=self.cluster.bookies,
                clock=self.cluster.clock,
                rng=random.Random(0),
                fallback_digest=DIGEST,
            ),
            view=await views.refresh(),
            ur=UR,
            cluster=HERE,
            clock=self.cluster.clock,
        )

    async def undo(self, record: JournalRecord, *, is_forced: bool = False) -> Restoring:
        membership = await Membership.join(self.store, UR, node_info("operator"))
        return await (await self.restorer()).restore(
            record, session=membership.guard.check, holder="operator", is_forced=is_forced
        )

    async def own_marks(self) -> list[int]:
        found = await marked_ledger_ids(self.cluster.store, OWN)
        return [i for i in found if await self.store.exists(payloads.mark_path(OWN, i))]

    async def is_unmarked(self) -> bool:
        return await self.own_marks() == []

    async def read(self) -> VersionedMetadata:
        return await self.cluster.manager.read(LEDGER)


async def repaired() -> Undoing:
    """Of B1, B2 and B3 the second was replaced; it is back, with all that it had."""
    cluster = await Cluster.start()
    undoing = Undoing(cluster)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await repair(cluster, local=B4, journal=undoing.journal)
    await cluster.revive(B2)
    return undoing


@in_virtual_time
async def test_the_metadata_is_byte_for_byte_what_it_was_before_the_write() -> None:
    undoing = await repaired()

    done = await undoing.undo(undoing.records[0])

    assert not done.is_done
    assert (await undoing.read()).data == undoing.records[0].before
    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]
    await undoing.cluster.assert_whole()
    assert await undoing.cluster.locked() == []


@in_virtual_time
async def test_what_was_undone_can_be_undone() -> None:
    undoing = await repaired()
    await undoing.undo(undoing.records[0])

    await undoing.undo(undoing.records[1])

    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]
    assert len(undoing.records) == 3


@in_virtual_time
async def test_undoing_twice_changes_nothing_the_second_time() -> None:
    undoing = await repaired()
    await undoing.undo(undoing.records[0])
    version = (await undoing.read()).version

    again = await undoing.undo(undoing.records[0])

    assert again.is_done
    assert (await undoing.read()).version == version


@in_virtual_time
async def test_what_was_written_since_is_not_undone_without_a_word() -> None:
    undoing = await repaired()
    versioned = await undoing.read()
    moved = versioned.metadata.segments[0].with_bookies({2: B4, 1: B3})
    await undoing.cluster.manager.write(
        LEDGER, replace(versioned.metadata, segments=(moved,)), read_as=versioned
    )
    undoing.cluster.violations.clear()  # that one was not ours

    with pytest.raises(RestoreRefusedError, match="written again since"):
        await undoing.undo(undoing.records[0])
    assert (await undoing.read()).metadata.segments == (moved,)
    assert await undoing.cluster.locked() == []

    await undoing.undo(undoing.records[0], is_forced=True)
    assert (await undoing.read()).data == undoing.records[0].before


# --- What is put back may name copies that are gone ------------------------------------------------


async def wiped(cluster: Cluster) -> None:
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)


async def decommissioned(cluster: Cluster) -> None:
    await cluster.kill(B2)


async def collected(cluster: Cluster) -> None:
    """Its garbage collector has deleted one entry's copy, which no metadata named any more."""
    cluster.bookie(B2).lose(LEDGER, 4)


async def hanging(cluster: Cluster) -> None:
    cluster.bookie(B2).is_down = True


async def away(cluster: Cluster) -> None:
    await keep_away(cluster, B2)
    await cluster.kill(B2)


@pytest.mark.parametrize(
    ("happens", "doubt"),
    [
        pytest.param(wiped, f"{B2} lacks 7 of the 7 entries", id="a member was wiped"),
        pytest.param(decommissioned, f"{B2} is not registered", id="a member is gone"),
        pytest.param(collected, f"{B2} lacks 1 of the 7 entries", id="garbage was collected"),
        pytest.param(hanging, f"{B2} did not say", id="a member hangs"),
        pytest.param(away, f"{B2} is under maintenance", id="a member is away"),
    ],
)
@in_virtual_time
async def test_rule_s1_a_bookie_without_the_entries_is_not_named_without_a_word(
    happens: Callable[[Cluster], Awaitable[None]], doubt: str
) -> None:
    undoing = await repaired()
    await happens(undoing.cluster)

    with pytest.raises(RestoreRefusedError, match=re.escape(doubt)):
        await undoing.undo(undoing.records[0])

    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]
    assert await undoing.own_marks() == []
    assert await undoing.cluster.locked() == []


@in_virtual_time
async def test_a_member_that_drains_is_no_reason_to_ask() -> None:
    undoing = await repaired()
    await drain(undoing.cluster, B2)

    await undoing.undo(undoing.records[0])

    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]


@in_virtual_time
async def test_what_was_put_back_by_force_is_mended_by_the_nodes() -> None:
    undoing = await repaired()
    await wiped(undoing.cluster)

    await undoing.undo(undoing.records[0], is_forced=True)

    undoing.cluster.violations.clear()  # that one was forced
    async with undoing.cluster.node() as node, working(node):
        await until(undoing.cluster, undoing.is_unmarked)
    await undoing.cluster.assert_whole()


# --- The mark -------------------------------------------------------------------------------------


@in_virtual_time
async def test_whatever_is_put_back_is_marked_for_the_nodes_to_check() -> None:
    undoing = await repaired()

    await undoing.undo(undoing.records[0])
    assert await undoing.own_marks() == [LEDGER]

    await undoing.undo(undoing.records[1])
    assert await undoing.own_marks() == [LEDGER]
    assert await undoing.cluster.ensembles() == [(B1, B4, B3)]


@in_virtual_time
async def test_a_directory_that_a_crash_left_behind_gets_its_mark() -> None:
    undoing = await repaired()
    directory = payloads.mark_path(OWN, LEDGER).rpartition("/")[0]
    await undoing.cluster.store.create(directory, with_parents=True)

    await undoing.undo(undoing.records[0])

    assert await undoing.own_marks() == [LEDGER]


@in_virtual_time
async def test_rule_s6_the_metadata_is_not_put_back_without_its_mark() -> None:
    """A worker tidies the upper directories away before each write, but for the last."""
    undoing = await repaired()
    parent = payloads.mark_path(OWN, LEDGER).rsplit("/", 2)[0]
    tidied = 0

    def tidy(_store: MemoryStore, operations: Sequence[Operation]) -> None:
        nonlocal tidied
        is_write = any(each.path == undoing.manager.path(LEDGER) for each in operations)
        if is_write and tidied < 2:
            tidied += 1
            undoing.cluster.tree.apply(undoing.store.session_id, [Delete(path=parent)])

    undoing.cluster.tree.faults = tidy

    await undoing.undo(undoing.records[0])

    assert tidied == 2
    assert await undoing.own_marks() == [LEDGER]
    assert await undoing.cluster.ensembles() == [(B1, B2, B3)]
    assert len(undoing.records) == 2, "one write, one record"


@in_virtual_time
async def test_what_was_noted_of_its_next_try_is_not_waited_for() -> None:
    undoing = await repaired()
    await undoing.cluster.store.create(waiting_path(UR, LEDGER), b"{}", with_parents=True)

    await undoing.undo(undoing.records[0])

    assert await undoing.cluster.store.exists(waiting_path(UR, LEDGER)) is None


# --- Of another cluster ---------------------------------------------------------------------------


@in_virtual_time
async def test_what_was_written_in_another_cluster_is_not_put_back_even_by_force() -> None:
    undoing = await repaired()
    before = await undoing.read()
    foreign = replace(undoing.records[0], cluster="another")

    with pytest.raises(RestoreRefusedError, match="another cluster"):
        await undoing.undo(foreign, is_forced=True)

    assert (await undoing.read()).version == before.version
    assert await undoing.cluster.locked() == []


@in_virtual_time
async def test_what_was_written_in_a_cluster_that_nobody_knows_is_told_by_its_bytes() -> None:
    undoing = await repaired()
    unknown = replace(undoing.records[0], cluster=None)
    await touch(undoing.cluster)
    await undoing.undo(unknown)

    changed = await undoing.read()
    assert changed.data == unknown.before

    with pytest.raises(RestoreRefusedError, match="does not say which cluster"):
        await undoing.undo(replace(unknown, before=unknown.after, after=b"other bytes"))


# --- The ledger's end -----------------------------------------------------------------------------


def reopened(found: VersionedMetadata) -> VersionedMetadata:
    metadata = replace(found.metadata, state=LedgerState.OPEN, last_entry_id=-1, length=0)
    return replace(found, metadata=metadata)


def shortened(found: VersionedMetadata) -> VersionedMetadata:
    return replace(found, metadata=replace(found.metadata, last_entry_id=5))


@pytest.mark.parametrize(
    ("before", "doubt"),
    [
        pytest.param(reopened, "turn a closed ledger back to OPEN", id="its closing"),
        pytest.param(shortened, "move the ledger's end from entry 9 to 5", id="its end"),
    ],
)
@in_virtual_time
async def test_the_end_of_a_closed_ledger_is_not_moved_without_a_word(
    before: Callable[[VersionedMetadata], VersionedMetadata], doubt: str
) -> None:
    cluster = await Cluster.start()
    undoing = Undoing(cluster)
    written = await cluster.write_ledger((B1, B2, B3))
    undoing.manager.write_operation(LEDGER, before(written).metadata, read_as=written)
    recorded = undoing.records[0]
    recorded = replace(recorded, before=recorded.after, after=recorded.before)

    with pytest.raises(RestoreRefusedError, match=doubt):
        await undoing.undo(recorded)


@in_virtual_time
async def test_metadata_that_cannot_be_read_any_more_is_put_back() -> None:
    undoing = await repaired()
    path = undoing.manager.path(LEDGER)
    await undoing.store.set(path, b"nonsense", version=-1)

    found = await (await undoing.restorer()).plan(undoing.records[0])
    assert found.now is None
    assert found.doubts
    await undoing.undo(undoing.records[0], is_forced=True)

    assert (await undoing.read()).data == undoing.records[0].before


@in_virtual_time
async def test_rule_s3_a_ledger_that_somebody_is_repairing_is_left_alone() -> None:
    undoing = await repaired()
    before = await undoing.read()
    await undoing.cluster.store.create(payloads.lock_path(UR, LEDGER))

    with pytest.raises(UnavailableError, match="somebody is repairing it"):
        await undoing.undo(undoing.records[0])

    assert (await undoing.read()).version == before.version
    assert len(await undoing.cluster.locked()) == 1


@in_virtual_time
async def test_rule_s2_a_write_that_comes_in_between_is_not_overwritten() -> None:
    undoing = await repaired()
    cluster, path = undoing.cluster, undoing.manager.path(LEDGER)
    put_back = undoing.manager.put_back_operation

    def with_another_write_first(*arguments: object, **options: object) -> SetData:
        operation = put_back(*arguments, **options)  # type: ignore[arg-type]
        before = cluster.tree.nodes[path]
        cluster.tree.apply(
            cluster.store.session_id,
            [SetData(path=path, data=before.data, version=operation.version)],
        )
        return operation

    undoing.manager.put_back_operation = with_another_write_first  # type: ignore[method-assign]

    with pytest.raises(ConflictError):
        await undoing.undo(undoing.records[0])
    assert await cluster.ensembles() == [(B1, B4, B3)]
    assert await cluster.locked() == []


@in_virtual_time
async def test_a_ledger_that_is_gone_is_not_made_anew() -> None:
    undoing = await repaired()
    await undoing.cluster.manager.delete(LEDGER, version=-1)

    with pytest.raises(NoSuchLedgerError):
        await undoing.undo(undoing.records[0])
