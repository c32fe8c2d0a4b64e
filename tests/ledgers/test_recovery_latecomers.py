"""Recovery with bookies newer than the ledger: reformatted ones, and ones that joined later and
lost nothing."""

import asyncio
from contextlib import suppress

import pytest

from ledgers.errors import ReadOnlyError, UnavailableError
from ledgers.model import BookieId, LedgerState
from tests.ledgers.hooked_bookies import Call, Hook, nothing
from tests.ledgers.memory_cluster import LEDGER_ID, A, B, C, D, E, F, MemoryCluster
from tests.replication.cluster import in_virtual_time


async def moved_to_new_bookies(*holders: BookieId, first: int = 2) -> MemoryCluster:
    """Return a ledger that an ensemble change moved to B and C, which are newer than the ledger."""
    cluster = await MemoryCluster.with_ledger([A, E, F], [A, B, C], firsts=(0, first))
    for entry_id in range(first, first + 4):
        await cluster.put(entry_id, *holders)
    return cluster


@in_virtual_time
async def test_the_denial_of_a_later_member_with_its_entries_counts() -> None:
    """It joined the ensemble later, and has its first entry."""
    cluster = await moved_to_new_bookies(A, B, C)
    cluster.down = {A}

    assert (await cluster.recover(reformatted={B, C})).last_entry_id == 5


@in_virtual_time
async def test_a_later_member_without_its_first_entry_was_reformatted() -> None:
    """C stored entries after it; A, which is down, and C acknowledged entry 4."""
    cluster = await moved_to_new_bookies(A, B, C)
    await cluster.put(6, A, C)
    for entry_id in range(2, 7):
        cluster.bookies.bookie(C).lose(LEDGER_ID, entry_id)
    await cluster.put(7, C)
    cluster.down = {A}

    with pytest.raises(UnavailableError):
        await cluster.recover(reformatted={B, C})
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY


@in_virtual_time
async def test_a_first_member_newer_than_the_ledger_is_never_believed() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], [A, B, D], firsts=(0, 2))
    for entry_id in range(2, 6):
        await cluster.put(entry_id, B, D)  # B was given its first entries back
    cluster.down = {A}

    with pytest.raises(UnavailableError):
        await cluster.recover(reformatted={B})


@in_virtual_time
async def test_no_bookie_is_believed_before_all_entries_are_saved() -> None:
    """The first entry of each bookie is copied last."""
    cluster = await moved_to_new_bookies(A)

    with pytest.raises(UnavailableError, match="2 to 5 remain"):
        await cluster.recover(reformatted={B, C})

    order = [call.entry_id for call in cluster.bookies.called("add") if call.bookie == B]
    assert order == [5, 4, 3, 2]


@in_virtual_time
async def test_a_bookie_known_to_have_lost_entries_is_not_believed() -> None:
    """Although it has its first entry."""
    cluster = await moved_to_new_bookies(A, B, C)
    cluster.down = {A}

    with pytest.raises(UnavailableError):
        await cluster.recover(reformatted={B, C}, distrusted={B})


async def reformatted_member(
    *, silent_from: int | None = None, is_needed: bool = False
) -> MemoryCluster:
    """Return a ledger whose entries 2 to 6 B and C acknowledged while A was slow; then B was
    reformatted.

    C returns nothing from an entry on, because it is stopping. ``is_needed``: no bookie can replace
    B, and A may refuse adds too.
    """
    cluster = await MemoryCluster.with_ledger([A, E, F], [A, B, C], firsts=(0, 2))
    for entry_id in range(2, 7):
        await cluster.put(entry_id, C, lac=1)
    if is_needed:
        cluster.unwritable = {A, D, E, F}
    answer = cluster.bookies.before

    async def go_down(call: Call) -> None:
        if silent_from is not None and call.bookie == C and call.entry_id >= silent_from:
            cluster.down = {C}
        await answer(call)

    cluster.bookies.before = go_down
    return cluster


@pytest.mark.parametrize("is_needed", [False, True])
@pytest.mark.parametrize("silent_from", [2, 3, 4, 6])
@in_virtual_time
async def test_a_recovery_cut_short_makes_no_bookie_trusted(
    silent_from: int, is_needed: bool
) -> None:
    """With its first entry B would deny entries that only C has."""
    cluster = await reformatted_member(silent_from=silent_from, is_needed=is_needed)
    for _ in range(3):
        with pytest.raises(UnavailableError):
            await cluster.recover(reformatted={B})
        assert all(A in cluster.stored_on(entry_id) for entry_id in range(2, silent_from))
    assert B not in cluster.stored_on(2)
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

    cluster.bookies.before, cluster.down = nothing, set()
    assert (await cluster.recover(reformatted={B})).last_entry_id == 6
    assert all(len(cluster.stored_on(entry_id)) >= 3 for entry_id in range(2, 7))


@pytest.mark.parametrize("is_needed", [False, True])
@in_virtual_time
async def test_a_recovery_stopped_between_two_adds_makes_none_trusted(is_needed: bool) -> None:
    for adds_max in range(25):
        cluster = await reformatted_member(is_needed=is_needed)
        answer = cluster.bookies.before

        async def stop(
            call: Call,
            cluster: MemoryCluster = cluster,
            adds_max: int = adds_max,
            answer: Hook = answer,
        ) -> None:
            if len(cluster.bookies.called("add")) > adds_max:
                await asyncio.Event().wait()
            await answer(call)

        cluster.bookies.before = stop
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await cluster.recover(reformatted={B})
        cluster.bookies.before, cluster.down = answer, {C}
        with suppress(UnavailableError):
            assert (await cluster.recover(reformatted={B})).last_entry_id == 6, adds_max


@in_virtual_time
async def test_another_bookie_replaces_a_possibly_reformatted_one() -> None:
    cluster = await reformatted_member()

    recovered = await cluster.recover(reformatted={B})

    assert recovered.last_entry_id == 6
    assert B not in recovered.last_segment.ensemble
    assert all(len(cluster.stored_on(entry_id)) == 3 for entry_id in range(2, 7))


@in_virtual_time
async def test_without_entries_to_add_none_replaces_it() -> None:
    cluster = MemoryCluster()
    made = await cluster.make_ledger([A, E, F], [A, B, C], firsts=(0, 2))

    assert (await cluster.recover(reformatted={B})).segments == made.metadata.segments


@in_virtual_time
async def test_former_members_are_not_asked_for_their_first_entry() -> None:
    cluster = await MemoryCluster.with_ledger([A, E, F], [A, D, F], [A, B, C], firsts=(0, 1, 2))
    await cluster.put(2, A, C, lac=1)

    assert (await cluster.recover(reformatted={D, B})).last_entry_id == 2


@in_virtual_time
async def test_a_needed_bookie_that_refuses_some_gets_no_first_entry() -> None:
    cluster = await reformatted_member(is_needed=True)

    async def fill_up(call: Call) -> None:
        if call.operation == "add" and call.bookie == B and call.entry_id >= 5:
            raise ReadOnlyError("its disk is full")

    cluster.bookies.before = fill_up
    assert (await cluster.recover(reformatted={B})).last_entry_id == 6

    assert [cluster.stored_on(entry_id) for entry_id in (2, 3, 6)] == [{A, C}, {A, B, C}, {A, C}]


@in_virtual_time
async def test_many_entries_are_sent_to_a_needed_bookie_concurrently() -> None:
    cluster = await reformatted_member(is_needed=True)
    for entry_id in range(7, 1_000):
        await cluster.put(entry_id, C, lac=1)

    async def be_slow(call: Call) -> None:
        if call.operation == "add" and call.bookie == B:
            await asyncio.sleep(1.0)

    cluster.bookies.before = be_slow
    began_s = cluster.clock.now_s()
    assert (await cluster.recover(reformatted={B})).last_entry_id == 999
    assert cluster.clock.now_s() - began_s < 30


@in_virtual_time
async def test_no_first_entry_while_an_absent_bookie_may_have_more() -> None:
    """B would be believed with it, and cut off entry 6, which C has as well."""
    cluster = await moved_to_new_bookies(A)
    await cluster.put(6, C)
    cluster.down = {C}

    for _ in range(2):
        with pytest.raises(UnavailableError):
            await cluster.recover(reformatted={B})
    assert [cluster.stored_on(entry_id) for entry_id in (2, 3, 5)] == [{A}, {A, B}, {A, B}]

    cluster.down = set()
    assert (await cluster.recover(reformatted={B})).last_entry_id == 6
