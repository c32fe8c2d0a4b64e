"""Recovery where bookies lost what they had acknowledged: what is left is found, and saved."""

import pytest
from structlog.testing import capture_logs

from ledgers.errors import UnavailableError
from ledgers.metadata import LedgerState
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import LEDGER_ID, A, B, C, D, E, F, World
from tests.virtual_time import run


@pytest.mark.parametrize("ack_quorum", [2, 3])
def test_whoever_may_alone_have_the_last_entries_is_heard_before_the_noes_of_others(
    ack_quorum: int,
) -> None:
    """A and B lost the ledger's index, not their identity: they deny it at once, and C takes its time."""

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

        told = next(line for line in logs if line["event"] == "recovery.left_behind")
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
    """A and B were wiped: what those two alone acknowledged nobody knows, but C has four entries."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, C, lac=min(lac, entry_id - 1))

        with pytest.raises(UnavailableError, match="0 to 3 are left, and have their copies again"):
            await world.recover(distrusted={A, B})

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

        with pytest.raises(UnavailableError, match="2 to 3 are left"):
            await world.recover(distrusted={A, B})

        assert {call.entry_id for call in world.bookies.called("add")} == {2, 3}

    run(scenario())


def test_an_unproven_end_without_any_entry_is_told_as_such() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])

        with pytest.raises(UnavailableError, match="no bookie has any"):
            await world.recover(distrusted={A, B})

    run(scenario())
