import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from ledgers.entry import EntryHeader
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    FencedError,
    LedgerClosedError,
    NodeExistsError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    ReadOnlyError,
    RejectedError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.memory.bookies import Fault, Op
from ledgers.memory.store import Fault as StoreFault
from ledgers.memory.store import MemoryStore
from ledgers.metadata import DigestType, LedgerMetadata, LedgerState, Segment
from ledgers.operations import appending
from ledgers.operations.writer import PAYLOAD_BYTES_MAX, changed_by_writer, closed_by_writer
from ledgers.store import Operation
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import BOOKIES, PASSWORD, A, B, C, D, World
from tests.virtual_time import run

# --- Creating -------------------------------------------------------------------------------------


def test_a_new_ledger_is_open_and_empty_and_what_it_was_asked_to_be() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(
            ensemble_size=4,
            write_quorum=3,
            ack_quorum=2,
            digest_type=DigestType.HMAC,
            custom=(("app", b"demo"),),
            has_ctime=True,
        ) as writer:
            metadata = await world.metadata(writer.ledger_id)

        (segment,) = metadata.segments
        assert len(set(segment.ensemble)) == 4
        assert metadata == LedgerMetadata(
            ensemble_size=4,
            write_quorum=3,
            ack_quorum=2,
            digest_type=DigestType.HMAC,
            password=PASSWORD,
            custom=(("app", b"demo"),),
            ctime_ms=world.clock.wall_ms(),
            c_token=metadata.c_token,
            segments=(Segment(first_entry_id=0, ensemble=segment.ensemble),),
        )

    run(scenario())


@pytest.mark.parametrize("fault", StoreFault)
def test_a_create_whose_reply_is_lost_makes_one_ledger(fault: StoreFault) -> None:
    async def scenario() -> None:
        world = World()
        is_lost = False

        def lose(store: MemoryStore, operations: Sequence[Operation]) -> StoreFault | None:
            nonlocal is_lost
            is_create = any("/L" in operation.path for operation in operations)
            if not is_create or is_lost:
                return None
            is_lost = True
            return fault

        world.tree.faults = lose

        async with world.writer() as writer:
            await writer.add(b"entry")
            assert is_lost

        assert sum("/L" in path for path in world.tree.snapshot()) == 1

    run(scenario())


def test_an_id_that_is_taken_is_an_error() -> None:
    async def scenario() -> None:
        world = World()
        async with world.writer(ledger_id=5):
            pass

        with pytest.raises(NodeExistsError):
            async with world.writer(ledger_id=5):
                pass

    run(scenario())


def test_too_few_bookies_make_no_ledger() -> None:
    async def scenario() -> None:
        world = World()
        world.down = set(BOOKIES[2:])

        with pytest.raises(NotEnoughBookiesError):
            async with world.writer(ensemble_size=3):
                pass

    run(scenario())


# --- Adding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("metadata_version", [2, 3])
@pytest.mark.parametrize("quorums", [(1, 1, 1), (3, 3, 2), (3, 2, 2), (5, 3, 2), (4, 4, 4)])
def test_what_was_written_is_read(
    digest_type: DigestType, metadata_version: int, quorums: tuple[int, int, int]
) -> None:
    async def scenario() -> None:
        world = World()
        ensemble_size, write_quorum, ack_quorum = quorums
        payloads = [b"x" * length for length in (0, 1, 1000, 3, 70_000)]

        async with world.writer(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest_type=digest_type,
            metadata_version=metadata_version,
        ) as writer:
            entry_ids = [await writer.add(payload) for payload in payloads]
            closed = await writer.close()

        assert entry_ids == [0, 1, 2, 3, 4]
        assert await world.payloads(writer.ledger_id) == payloads
        assert closed.metadata.length == sum(map(len, payloads))
        assert closed.metadata.metadata_version == metadata_version

    run(scenario())


def test_an_entry_tells_the_lac_and_the_length_so_far() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            for payload in (b"a", b"bb", b"ccc"):
                await writer.add(payload)

        headers = {EntryHeader.of(call.entry) for call in world.bookies.called("add")}
        assert {(h.entry_id, h.lac, h.length) for h in headers} == {
            (0, -1, 1),
            (1, 0, 3),
            (2, 1, 6),
        }

    run(scenario())


def test_adds_are_pipelined_and_acknowledged_in_order() -> None:
    async def scenario() -> None:
        world = World()
        delays_s = {0: 3.0, 1: 1.0, 2: 2.0}

        async def delay(call: Call) -> None:
            await world.clock.sleep(delays_s[call.entry_id])

        world.bookies.before = delay

        async with world.writer() as writer:
            acknowledged: list[int] = []
            for _ in delays_s:
                future = await writer.send(b"entry")
                future.add_done_callback(lambda done: acknowledged.append(done.result()))
            await future

        assert world.clock.now_s() == 3.0
        assert acknowledged == [0, 1, 2]

    run(scenario())


def test_an_acknowledgement_needs_a_bookies_not_all() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=2) as writer:
            world.bookies.inner.fail(
                writer.metadata.last_segment.ensemble[1], Op.ADD, Fault(delay_s=60)
            )
            await writer.add(b"entry")
            assert world.clock.now_s() == 0

    run(scenario())


def test_no_more_is_unacknowledged_than_the_bounds_allow() -> None:
    async def scenario() -> None:
        world = World()
        under_way = 0

        async def never(call: Call) -> None:
            nonlocal under_way
            under_way = max(under_way, call.entry_id + 1)
            await world.clock.sleep(60)

        world.bookies.before = never

        async with world.writer() as writer, asyncio.TaskGroup() as group:
            adds = [group.create_task(writer.add(b"x" * 1024)) for _ in range(2000)]
            await world.clock.sleep(30)
            assert under_way == appending.ENTRIES_MAX
            for add in adds:
                add.cancel()

        async with world.writer() as writer, asyncio.TaskGroup() as group:
            under_way = 0
            adds = [group.create_task(writer.add(bytes(1_000_000))) for _ in range(20)]
            await world.clock.sleep(30)
            assert under_way == 8
            for add in adds:
                add.cancel()

    run(scenario())


def test_a_caller_that_goes_away_takes_nothing_with_it() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            add = asyncio.ensure_future(writer.add(b"nobody waits"))
            await asyncio.sleep(0)
            add.cancel()
            assert await writer.add(b"entry") == 1

    run(scenario())


def test_a_payload_that_fits_into_no_frame_is_refused_and_nothing_ends() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            with pytest.raises(RejectedError, match="too large"):
                await writer.add(bytes(PAYLOAD_BYTES_MAX + 1))
            assert await writer.add(bytes(PAYLOAD_BYTES_MAX)) == 0

    run(scenario())


# --- When bookies fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UnavailableError, ReadOnlyError])
def test_a_failed_bookie_is_replaced_from_the_first_unacknowledged_entry_on(
    error: type[BookmenderError],
) -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            before = writer.metadata.last_segment.ensemble
            await writer.add(b"0")
            world.bookies.inner.fail(before[1], Op.ADD, Fault(error=error))
            futures = [await writer.send(payload) for payload in (b"1", b"2", b"3")]
            assert [await future for future in futures] == [1, 2, 3]
            after = (await world.metadata(writer.ledger_id)).last_segment
            await writer.close()

        assert after.first_entry_id == 1
        assert (after.ensemble[0], after.ensemble[2]) == (before[0], before[2])
        assert after.ensemble[1] not in before
        for entry_id in (1, 2, 3):
            assert world.holders(entry_id, writer.ledger_id) >= set(after.ensemble)
        assert await world.payloads(writer.ledger_id) == [b"0", b"1", b"2", b"3"]

    run(scenario())


def test_a_bookie_replaced_before_anything_was_acknowledged_is_replaced_in_place() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            failed = writer.metadata.last_segment.ensemble[0]
            world.down = {failed}
            await writer.add(b"0")
            (segment,) = (await world.metadata(writer.ledger_id)).segments

        assert failed not in segment.ensemble

    run(scenario())


@pytest.mark.parametrize(
    ("first_s", "second_s"),
    [
        pytest.param(0, 10, id="acknowledged before it was replaced"),
        pytest.param(0, 0.5, id="the second acknowledgement comes while it is being replaced"),
        pytest.param(20, 10, id="acknowledged after it was replaced"),
    ],
)
def test_an_acknowledgement_of_a_replaced_bookie_does_not_count(
    first_s: float, second_s: float
) -> None:
    """Entry 1 is on the first bookie, which fails entry 2, soon on the second, late on the third."""

    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=2) as writer:
            first, second, third = writer.metadata.last_segment.ensemble
            await writer.add(b"0")
            world.tree.latency = partial(world.clock.sleep, 1.0)

            async def spoil(call: Call) -> None:
                if (call.bookie, call.entry_id) == (first, 2):
                    raise UnavailableError("EIO")
                await world.clock.sleep(
                    {first: first_s, second: second_s, third: 30}.get(call.bookie, 60)
                )

            world.bookies.before = spoil
            one, _ = [await writer.send(payload) for payload in (b"1", b"2")]
            await one

            named = (await world.metadata(writer.ledger_id)).segment_of(1).ensemble
            assert first not in named
            assert len(world.holders(1, writer.ledger_id) & set(named)) >= 2

    run(scenario())


def test_late_failures_of_a_replaced_bookie_are_not_held_against_its_replacement() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            failing = writer.metadata.last_segment.ensemble[0]

            async def fail_later_and_later(call: Call) -> None:
                if call.bookie == failing:
                    await world.clock.sleep(call.entry_id)
                    raise UnavailableError("EIO")

            world.bookies.before = fail_later_and_later
            futures = [await writer.send(b"entry") for _ in range(5)]
            await futures[-1]
            await world.clock.sleep(10)
            await writer.add(b"entry")

            assert (await world.manager.read(writer.ledger_id)).version == 1

    run(scenario())


def test_a_bookie_that_fails_while_another_is_being_replaced_is_replaced_too() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            first, second, _ = writer.metadata.last_segment.ensemble
            world.bookies.inner.fail(first, Op.ADD, Fault(error=UnavailableError))
            world.bookies.inner.fail(second, Op.ADD, Fault(error=UnavailableError, delay_s=1))
            await writer.add(b"0")
            (segment,) = (await world.metadata(writer.ledger_id)).segments

        assert not {first, second} & set(segment.ensemble)
        assert world.holders(0, writer.ledger_id) == set(segment.ensemble)

    run(scenario())


def test_a_replacement_that_fails_is_replaced_in_its_turn() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            ensemble = writer.metadata.last_segment.ensemble
            others = sorted(set(BOOKIES) - set(ensemble))
            for bookie in (ensemble[0], *others[:2]):
                world.bookies.inner.fail(bookie, Op.ADD, Fault(error=UnavailableError))
            await writer.add(b"0")
            (segment,) = (await world.metadata(writer.ledger_id)).segments

        assert segment.ensemble[0] == others[2]

    run(scenario())


def test_without_a_replacement_writing_goes_on_as_long_as_an_ack_quorum_is_left() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(ensemble_size=5, write_quorum=3, ack_quorum=2) as writer:
            ensemble = writer.metadata.last_segment.ensemble
            world.unwritable = set(BOOKIES)
            world.bookies.inner.fail(ensemble[0], Op.ADD, Fault(error=UnavailableError))
            adds = [await writer.add(b"entry") for _ in range(5)]
            assert adds == [0, 1, 2, 3, 4]
            assert (await world.metadata(writer.ledger_id)).last_segment.ensemble == ensemble

            world.bookies.inner.fail(ensemble[1], Op.ADD, Fault(error=UnavailableError))
            await writer.send(b"entry 5, for bookie indexes 0 to 2")
            with pytest.raises(NotEnoughBookiesError):
                await writer.add(b"entry 6")

    run(scenario())


@pytest.mark.compat("BookieRecoveryTest.testMetadataConflictWithRecovery", verdict="same")
def test_a_change_of_the_ensemble_survives_a_repair_of_an_earlier_segment() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            first, second, third = writer.metadata.last_segment.ensemble
            await writer.add(b"0")
            world.bookies.inner.fail(first, Op.ADD, Fault(error=UnavailableError))
            await writer.add(b"1")
            other = (set(BOOKIES) - {*writer.metadata.bookies}).pop()
            found = await world.manager.read(writer.ledger_id)
            repaired = Segment(first_entry_id=0, ensemble=(other, second, third))
            await world.manager.write(
                writer.ledger_id, found.metadata.with_segment(repaired), read_as=found
            )
            world.bookies.inner.fail(second, Op.ADD, Fault(error=UnavailableError))
            await writer.add(b"2")
            closed = await writer.close()

        assert closed.metadata.segments[0] == repaired
        assert [s.first_entry_id for s in closed.metadata.segments] == [0, 1, 2]

    run(scenario())


@pytest.mark.parametrize("error", [UnauthorizedError, RejectedError])
def test_what_every_bookie_would_refuse_stops_the_writer_and_replaces_nobody(
    error: type[BookmenderError],
) -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            for bookie in BOOKIES:
                world.bookies.inner.fail(bookie, Op.ADD, Fault(error=error))
            with pytest.raises(error):
                await writer.add(b"entry")
            assert (await world.manager.read(writer.ledger_id)).version == 0

    run(scenario())


# --- When somebody else recovers ------------------------------------------------------------------


def test_a_fenced_writer_stops_for_good() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.add(b"0")
            closed = await world.recover(writer.ledger_id)
            with pytest.raises(FencedError):
                await writer.add(b"1")
            with pytest.raises(FencedError):
                await writer.send(b"2")

        assert closed.last_entry_id == 0

    run(scenario())


def test_a_writer_replaces_no_bookie_of_a_ledger_that_is_being_recovered() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer(write_quorum=3, ack_quorum=3) as writer:
            found = await world.manager.read(writer.ledger_id)
            marked = found.metadata.with_state(LedgerState.IN_RECOVERY)
            await world.manager.write(writer.ledger_id, marked, read_as=found)
            world.down = {writer.metadata.last_segment.ensemble[0]}
            with pytest.raises(LedgerClosedError):
                await writer.add(b"0")

        assert await world.metadata(writer.ledger_id) == marked

    run(scenario())


def test_close_fails_what_is_not_acknowledged_and_ends_before_it() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.add(b"0")
            for bookie in BOOKIES:
                world.bookies.inner.fail(bookie, Op.ADD, Fault(delay_s=1))
            pending = await writer.send(b"pending")
            closed = await writer.close()
            with pytest.raises(LedgerClosedError):
                await pending
            with pytest.raises(LedgerClosedError):
                await writer.add(b"late")

        assert (closed.metadata.last_entry_id, closed.metadata.length) == (0, 1)

    run(scenario())


def test_closing_twice_is_closing_once() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            assert await writer.close() == await writer.close()

    run(scenario())


@pytest.mark.parametrize("fault", StoreFault)
def test_a_close_whose_reply_is_lost_is_looked_up(fault: StoreFault) -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.add(b"0")
            faults = iter([fault])
            world.tree.faults = lambda store, operations: next(faults, None) if operations else None
            closed = await writer.close()

        assert closed.metadata.is_closed
        assert closed.metadata == await world.metadata(writer.ledger_id)

    run(scenario())


def test_deleting_deletes_the_metadata() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.delete()

        with pytest.raises(NoSuchLedgerError):
            await world.metadata(writer.ledger_id)

    run(scenario())


def test_an_abandoned_ledger_stays_open() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.add(b"0")

        assert (await world.metadata(writer.ledger_id)).state is LedgerState.OPEN

    run(scenario())


def test_an_explicit_lac_shows_readers_the_last_entry() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.write_explicit_lac()  # nothing to tell yet
            await writer.add(b"0")
            assert (await world.open(writer.ledger_id)).lac == -1
            await writer.write_explicit_lac()
            assert (await world.open(writer.ledger_id)).lac == 0

    run(scenario())


def test_too_few_that_take_the_explicit_lac_are_an_error_of_no_consequence() -> None:
    async def scenario() -> None:
        world = World()

        async with world.writer() as writer:
            await writer.add(b"0")
            for bookie in BOOKIES:
                world.bookies.inner.fail(bookie, Op.WRITE_LAC, Fault(error=UnavailableError))
            with pytest.raises(UnavailableError):
                await writer.write_explicit_lac()
            await writer.add(b"1")

    run(scenario())


# --- The decisions --------------------------------------------------------------------------------

OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=3,
    ack_quorum=2,
    segments=(Segment(first_entry_id=0, ensemble=(A, B, C)),),
)
BEFORE = OPEN.last_segment
CHANGE = Segment(first_entry_id=4, ensemble=(A, B, D))


def test_a_change_appends_a_segment_or_replaces_the_one_that_starts_there() -> None:
    in_place = Segment(first_entry_id=0, ensemble=(A, B, D))

    assert changed_by_writer(OPEN, CHANGE, before=BEFORE).segments == (BEFORE, CHANGE)
    assert changed_by_writer(OPEN, in_place, before=BEFORE).segments == (in_place,)


@pytest.mark.compat("MetadataUpdateLoopTest.testConflictOnWriteBothWritingSame", verdict="same")
def test_a_change_that_is_there_already_is_not_made_twice() -> None:
    changed = OPEN.with_segment(CHANGE)

    assert changed_by_writer(changed, CHANGE, before=BEFORE) is changed


def test_a_change_keeps_what_it_does_not_know() -> None:
    segment = Segment(first_entry_id=0, ensemble=(A, B, C), unknown_fields=b"new")
    metadata = OPEN.with_segment(segment)
    in_place = Segment(first_entry_id=0, ensemble=(A, B, D))

    changed = changed_by_writer(metadata, in_place, before=segment)

    assert changed.last_segment == Segment(
        first_entry_id=0, ensemble=(A, B, D), unknown_fields=b"new"
    )


@pytest.mark.parametrize("state", [LedgerState.IN_RECOVERY, LedgerState.CLOSED])
def test_only_an_open_ledger_changes_its_ensemble(state: LedgerState) -> None:
    with pytest.raises(LedgerClosedError):
        changed_by_writer(OPEN.with_state(state), CHANGE, before=BEFORE)


@pytest.mark.compat(
    "MetadataUpdateLoopTest.testConflictOnLocalUpdate",
    verdict="other",
    why="nobody keeps a copy of the metadata that others change: each decision reads its own",
)
@pytest.mark.compat(
    "MetadataUpdateLoopTest.testNewestValueCannotBeUsedAfterReadBack",
    verdict="same",
)
def test_an_ensemble_that_somebody_else_changed_is_not_ours_to_change() -> None:
    other = OPEN.with_segment(Segment(first_entry_id=0, ensemble=(A, D, C)))

    with pytest.raises(ConflictError):
        changed_by_writer(other, CHANGE, before=BEFORE)


@pytest.mark.compat(
    "ParallelLedgerRecoveryTest.testRecoveryWhenClosingLedgerHandle",
    verdict="same",
)
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_a_writer_closes_also_while_somebody_recovers(state: LedgerState) -> None:
    metadata = OPEN.with_state(state)

    closed = closed_by_writer(metadata, last_entry_id=4, length=50)

    assert closed == OPEN.closed(last_entry_id=4, length=50)


@pytest.mark.parametrize(("last_entry_id", "length"), [(4, 51), (5, 50)])
def test_another_end_than_the_writers_is_an_error(last_entry_id: int, length: int) -> None:
    closed = OPEN.closed(last_entry_id=4, length=50)

    assert closed_by_writer(closed, last_entry_id=4, length=50) is closed
    with pytest.raises(LedgerClosedError):
        closed_by_writer(closed, last_entry_id=last_entry_id, length=length)


def test_leaving_the_writer_waits_for_the_copies_that_no_acknowledgement_needed() -> None:
    async def scenario() -> None:
        world = World()
        async with world.writer(ensemble_size=3, write_quorum=3, ack_quorum=1) as writer:
            slow = writer.metadata.last_segment.ensemble[0]

            async def late(call: Call) -> None:
                if call.operation == "add" and call.bookie == slow:
                    await world.clock.sleep(2.0)

            world.bookies.before = late
            await writer.add(b"entry")
            await writer.close()
            assert slow not in world.holders(0, writer.ledger_id)

        assert slow in world.holders(0, writer.ledger_id)

    run(scenario())
