"""Recovery where bookies lost what they had acknowledged: what is left is found, and saved."""

import pytest
from structlog.testing import capture_logs

from ledgers.bookies import LAST_ENTRY
from ledgers.digest import EntryDigest
from ledgers.errors import FencedError, UnavailableError, UnprovenEndError
from ledgers.model import DigestType, LedgerState
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import LEDGER_ID, PASSWORD, A, B, C, D, E, F, World
from tests.virtual_time import run


@pytest.mark.parametrize("ack_quorum", [2, 3])
def test_whoever_may_alone_have_the_last_entries_is_heard_before_the_noes_of_others(
    ack_quorum: int,
) -> None:
    """A and B lost the ledger's index, not their identity: they deny it at once, and C takes its
    time."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=ack_quorum)
        for entry_id in range(4):
            await world.put(entry_id, C)

        async def answer_late(call: Call) -> None:
            await world.clock.sleep(0.3 if call.bookie == C else 0.0)

        world.bookies.before = answer_late

        assert (await world.recover()).last_entry_id == 3
        assert world.holders(3) == {A, B, C}

    run(scenario())


def test_entries_that_are_shown_and_never_given_hold_nothing_up_and_are_told_of() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, C)

        async def spoil(call: Call) -> None:
            if (call.bookie, call.entry_id) == (C, 0):
                raise UnavailableError("EIO")

        world.bookies.before = spoil

        with capture_logs() as logs:
            assert (await world.recover()).last_entry_id == -1

        told = next(line for line in logs if line["event"] == "recovery.entries_excluded")
        assert (told["ledger_id"], told["last_entry_id"], told["shown"]) == (LEDGER_ID, -1, {C: 0})

    run(scenario())


def test_nothing_is_told_of_a_ledger_that_ends_where_its_bookies_end() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)

        with capture_logs() as logs:
            await world.recover()

        assert logs == []

    run(scenario())


@pytest.mark.parametrize("lac", [-1, 1], ids=["nothing known", "up to entry 1 known"])
def test_what_is_left_has_its_copies_again_even_where_the_end_cannot_be_proven(lac: int) -> None:
    """A and B were wiped: what those two alone acknowledged nobody knows, but C has four
    entries."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, C, lac=min(lac, entry_id - 1))

        with (
            capture_logs() as logs,
            pytest.raises(UnprovenEndError, match="0 to 3 remain; their copies are restored"),
        ):
            await world.recover(reformatted={A, B})

        assert [(line["event"], line["ledger_id"]) for line in logs] == [
            ("recovery.end_unproven", LEDGER_ID)
        ]
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY
        for entry_id in range(4):
            assert world.holders(entry_id) == {A, B, C}, entry_id

    run(scenario())


def test_what_an_unproven_end_leaves_begins_with_the_last_segment() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([D, E, F], [A, B, C], firsts=(0, 2))
        for entry_id in (2, 3):
            await world.put(entry_id, C)

        with pytest.raises(UnavailableError, match="2 to 3 remain"):
            await world.recover(reformatted={A, B})

        assert {call.entry_id for call in world.bookies.called("add")} == {2, 3}

    run(scenario())


def test_an_unproven_end_without_any_entry_is_told_as_such() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])

        with pytest.raises(UnavailableError, match="no bookie returned an entry"):
            await world.recover(reformatted={A, B})

    run(scenario())


def test_what_is_left_beyond_entries_that_nobody_has_is_saved_too() -> None:
    """Each entry is on two bookies of three: of A's and B's own nothing is left, of C's stripe one
    copy."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], write_quorum=2)
        for entry_id in range(6):
            if entry_id % 3:
                await world.put(entry_id, C)

        with pytest.raises(UnavailableError, match="0 to 5 remain, except 2 that"):
            await world.recover(reformatted={A, B})

        holders = [world.holders(entry_id) for entry_id in range(6)]
        assert holders == [set(), {B, C}, {C, A}] * 2

    run(scenario())


def test_what_is_saved_tells_no_less_of_what_is_acknowledged_than_before() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, C)

        with pytest.raises(UnavailableError, match="0 to 3 remain"):
            await world.recover(reformatted={A, B})

        assert (await world.open()).lac == 2

    run(scenario())


def test_what_is_saved_is_not_given_again_to_those_that_have_it() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, C)

        for _ in range(2):
            with pytest.raises(UnavailableError, match="0 to 3 remain"):
                await world.recover(reformatted={A, B})

        assert len(world.bookies.called("add")) == 8

    run(scenario())


def test_who_refuses_a_copy_keeps_none_from_the_others() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, C)

        async def refuse(call: Call) -> None:
            if call.operation == "add" and call.bookie == B:
                raise FencedError("deleted here")

        world.bookies.before = refuse

        with pytest.raises(UnavailableError, match=f"their copies are restored, except on {B}"):
            await world.recover(reformatted={A, B})

        assert all(world.holders(entry_id) == {A, C} for entry_id in range(4)), "nobody takes over"

    run(scenario())


def test_a_damaged_last_entry_keeps_none_of_the_others_from_being_saved() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(3):
            await world.put(entry_id, C)
        await world.put(3, C, digest=EntryDigest(DigestType.CRC32, PASSWORD))

        with pytest.raises(UnavailableError, match="0 to 2 remain"):
            await world.recover(reformatted={A, B})

        assert all(world.holders(entry_id) == {A, B, C} for entry_id in range(3))

    run(scenario())


# --- Others are silent --------------------------------------------------------------------------------


def test_a_wiped_bookie_is_given_what_is_left_though_another_is_away_for_good() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, C)
        world.down = {B}

        with pytest.raises(UnavailableError, match="could be fenced; entries 0 to 3 remain"):
            await world.recover(reformatted={A})

        assert (await world.metadata()).state is LedgerState.IN_RECOVERY
        assert all(world.holders(entry_id) == {A, C} for entry_id in range(4))

    run(scenario())


def test_nothing_is_read_again_where_nobody_was_wiped() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, C)
        world.down = {A, B}

        with pytest.raises(UnavailableError, match="could be fenced"):
            await world.recover()

        assert {call.entry_id for call in world.bookies.called("read_fencing")} == {LAST_ENTRY}

    run(scenario())
