"""Recovery where bookies are younger than the ledger: wiped since, or joined later and lost
nothing."""

import asyncio
from contextlib import suppress

import pytest

from ledgers.errors import ReadOnlyError, UnavailableError
from ledgers.model import BookieId, LedgerState
from tests.ledgers.hooked_bookies import Call, Hook, nothing
from tests.ledgers.world import LEDGER_ID, A, B, C, D, E, F, World
from tests.virtual_time import run


async def moved_to_young_bookies(*holders: BookieId, first: int = 2) -> World:
    """A ledger that a change of its ensemble moved to B and C, which were set up after it was
    made."""
    world = World()
    await world.make_ledger([A, E, F], [A, B, C], firsts=(0, first))
    for entry_id in range(first, first + 4):
        await world.put(entry_id, *holders)
    return world


def test_the_no_of_a_bookie_that_came_later_and_kept_its_entries_is_believed() -> None:
    async def scenario() -> None:
        world = await moved_to_young_bookies(A, B, C)
        world.down = {A}

        assert (await world.recover(reformatted={B, C})).last_entry_id == 5

    run(scenario())


def test_one_that_came_later_and_lacks_its_first_entry_was_wiped_since() -> None:
    """C added on after it was wiped: entry 4 was acknowledged by it and A, which is away."""

    async def scenario() -> None:
        world = await moved_to_young_bookies(A, B, C)
        await world.put(6, A, C)
        for entry_id in range(2, 7):
            world.bookies.bookie(C).lose(LEDGER_ID, entry_id)
        await world.put(7, C)
        world.down = {A}

        with pytest.raises(UnavailableError):
            await world.recover(reformatted={B, C})
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY

    run(scenario())


def test_a_founding_member_that_is_younger_than_its_ledger_is_never_believed() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], [A, B, D], firsts=(0, 2))
        for entry_id in range(2, 6):
            await world.put(entry_id, B, D)  # B was given its first entries back
        world.down = {A}

        with pytest.raises(UnavailableError):
            await world.recover(reformatted={B})

    run(scenario())


def test_what_is_saved_makes_nobody_believed_before_all_of_it_is() -> None:
    """An interrupted rescue leaves the first entry of each bookie out."""

    async def scenario() -> None:
        world = await moved_to_young_bookies(A)

        with pytest.raises(UnavailableError, match="2 to 5 remain"):
            await world.recover(reformatted={B, C})

        order = [call.entry_id for call in world.bookies.called("add") if call.bookie == B]
        assert order == [5, 4, 3, 2]

    run(scenario())


def test_one_that_is_known_to_have_lost_entries_is_not_believed_for_having_its_first() -> None:
    async def scenario() -> None:
        world = await moved_to_young_bookies(A, B, C)
        world.down = {A}

        with pytest.raises(UnavailableError):
            await world.recover(reformatted={B, C}, distrusted={B})

    run(scenario())


async def wiped_latecomer(*, silent_from: int | None = None, is_needed: bool = False) -> World:
    """Entries 2 to 6 were acknowledged by B and C while A was slow, and then B was wiped. C gives
    nothing from an entry on, as it goes down. ``is_needed``: nobody could take over from B, and A
    may take nothing, either."""
    world = World()
    await world.make_ledger([A, E, F], [A, B, C], firsts=(0, 2))
    for entry_id in range(2, 7):
        await world.put(entry_id, C, lac=1)
    if is_needed:
        world.unwritable = {A, D, E, F}
    answer = world.bookies.before

    async def go_down(call: Call) -> None:
        if silent_from is not None and call.bookie == C and call.entry_id >= silent_from:
            world.down = {C}
        await answer(call)

    world.bookies.before = go_down
    return world


@pytest.mark.parametrize("is_needed", [False, True])
@pytest.mark.parametrize("silent_from", [2, 3, 4, 6])
def test_a_recovery_that_is_cut_short_makes_no_wiped_bookie_believed(
    silent_from: int, is_needed: bool
) -> None:
    """Had B been given its first entry, its noes of those that C alone has would cut them off."""

    async def scenario() -> None:
        world = await wiped_latecomer(silent_from=silent_from, is_needed=is_needed)
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await world.recover(reformatted={B})
            assert all(A in world.holders(entry_id) for entry_id in range(2, silent_from))
        assert B not in world.holders(2)
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY

        world.bookies.before, world.down = nothing, set()
        assert (await world.recover(reformatted={B})).last_entry_id == 6
        assert all(len(world.holders(entry_id)) >= 3 for entry_id in range(2, 7))

    run(scenario())


@pytest.mark.parametrize("is_needed", [False, True])
def test_nor_does_one_that_is_stopped_between_its_adds(is_needed: bool) -> None:
    async def scenario() -> None:
        for adds_max in range(25):
            world = await wiped_latecomer(is_needed=is_needed)
            answer = world.bookies.before

            async def stop(
                call: Call, world: World = world, adds_max: int = adds_max, answer: Hook = answer
            ) -> None:
                if len(world.bookies.called("add")) > adds_max:
                    await asyncio.Event().wait()
                await answer(call)

            world.bookies.before = stop
            with suppress(TimeoutError):
                async with asyncio.timeout(60):
                    await world.recover(reformatted={B})
            world.bookies.before, world.down = answer, {C}
            with suppress(UnavailableError):
                assert (await world.recover(reformatted={B})).last_entry_id == 6, adds_max

    run(scenario())


def test_another_takes_over_from_a_bookie_that_may_have_been_wiped() -> None:
    async def scenario() -> None:
        world = await wiped_latecomer()

        recovered = await world.recover(reformatted={B})

        assert recovered.last_entry_id == 6
        assert B not in recovered.last_segment.ensemble
        assert all(len(world.holders(entry_id)) == 3 for entry_id in range(2, 7))

    run(scenario())


def test_but_none_does_where_nothing_is_to_be_added() -> None:
    async def scenario() -> None:
        world = World()
        made = await world.make_ledger([A, E, F], [A, B, C], firsts=(0, 2))

        assert (await world.recover(reformatted={B})).segments == made.metadata.segments

    run(scenario())


def test_nothing_is_asked_of_young_bookies_that_are_no_members_any_more() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, E, F], [A, D, F], [A, B, C], firsts=(0, 1, 2))
        await world.put(2, A, C, lac=1)

        assert (await world.recover(reformatted={D, B})).last_entry_id == 2

    run(scenario())


def test_one_that_is_needed_and_does_not_take_all_is_not_given_its_first_entry() -> None:
    async def scenario() -> None:
        world = await wiped_latecomer(is_needed=True)

        async def fill_up(call: Call) -> None:
            if call.operation == "add" and call.bookie == B and call.entry_id >= 5:
                raise ReadOnlyError("its disk is full")

        world.bookies.before = fill_up
        assert (await world.recover(reformatted={B})).last_entry_id == 6

        assert [world.holders(entry_id) for entry_id in (2, 3, 6)] == [{A, C}, {A, B, C}, {A, C}]

    run(scenario())


def test_many_entries_go_to_one_that_is_needed_at_a_time() -> None:
    async def scenario() -> None:
        world = await wiped_latecomer(is_needed=True)
        for entry_id in range(7, 1_000):
            await world.put(entry_id, C, lac=1)

        async def be_slow(call: Call) -> None:
            if call.operation == "add" and call.bookie == B:
                await asyncio.sleep(1.0)

        world.bookies.before = be_slow
        began_s = world.clock.now_s()
        assert (await world.recover(reformatted={B})).last_entry_id == 999
        assert world.clock.now_s() - began_s < 30

    run(scenario())


def test_but_no_first_entry_while_one_who_is_away_may_have_more() -> None:
    """B would be believed with it, and cut off entry 6, which C has as well."""

    async def scenario() -> None:
        world = await moved_to_young_bookies(A)
        await world.put(6, C)
        world.down = {C}

        for _ in range(2):
            with pytest.raises(UnavailableError):
                await world.recover(reformatted={B})
        assert [world.holders(entry_id) for entry_id in (2, 3, 5)] == [{A}, {A, B}, {A, B}]

        world.down = set()
        assert (await world.recover(reformatted={B})).last_entry_id == 6

    run(scenario())
