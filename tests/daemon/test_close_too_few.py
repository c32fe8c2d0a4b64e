"""Open ledgers by hand, where too few bookies answer: nothing is begun, and it is said what
helps."""

import asyncio

import pytest

from auditor.checks.idle import LastChange
from daemon.cli.close_ledger import CloseRefusedError, whom_to_start
from daemon.cli.idle import closing_text
from ledgers.errors import UnavailableError
from ledgers.memory.bookies import NO_FAULT, Fault, Op
from ledgers.model import BookieId, LedgerState
from tests.daemon.closing import DAY_S, close, closer, remember, unproven_ledger
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER
from tests.replication.repairs import watch_fencing


async def acknowledged_by_two_of_three() -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    return cluster


@pytest.mark.parametrize("accepts_loss", [False, True])
@pytest.mark.parametrize("is_away", [True, False], ids=["away", "silent"])
@in_virtual_time
async def test_rule_s5_while_too_few_bookies_answer_nothing_is_begun(
    is_away: bool, accepts_loss: bool
) -> None:
    cluster = await acknowledged_by_two_of_three()
    for bookie in (B2, B3):
        cluster.bookie(bookie).is_down = True
        if is_away:
            await cluster.kill(bookie)
    fenced = watch_fencing(cluster)
    why = "not registered" if is_away else "registered, but silent"

    with pytest.raises(CloseRefusedError) as caught:
        await close(cluster, is_forced=True, accepts_loss=accepts_loss)

    assert f"no answer from {B2} ({why}), {B3} ({why})" in str(caught.value)
    assert f"start {B2} or {B3} (empty, if what was there is gone)" in str(caught.value)
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert await cluster.locked() == []


@in_virtual_time
async def test_that_it_cannot_be_closed_now_is_what_a_look_says_first() -> None:
    cluster = await acknowledged_by_two_of_three()
    await cluster.kill(B2, B3)

    shown = closing_text(await (await closer(cluster)).look(LEDGER), is_forced=True).splitlines()

    assert shown[-1].startswith("nothing was changed: it cannot be closed now, forced or not")
    assert not any("--yes" in line or "its end may not" in line for line in shown)


@in_virtual_time
async def test_rule_s5_the_answer_of_a_bookie_that_is_not_registered_does_not_count() -> None:
    cluster = await acknowledged_by_two_of_three()
    await cluster.kill(B3)
    await cluster.unregister(B2)  # it answers, or another bookie does at its address

    with pytest.raises(CloseRefusedError, match=f"no answer from {B2} .not registered."):
        await close(cluster, is_forced=True)

    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_a_look_says_that_bookies_were_wiped_so_that_its_end_may_not_be_provable() -> None:
    cluster = await unproven_ledger()

    shown = closing_text(await (await closer(cluster)).look(LEDGER), is_forced=False)

    assert (
        f"its end may not be provable (reformatted after the ledger was created: {B1}, {B2})"
        in shown
    )


# --- Its end could be found, but its last entries would not be on enough bookies -------------------------


async def acknowledged_by_both_of_two(*others: BookieId) -> Cluster:
    """B2 is away. ``others``: bookies that are there besides."""
    cluster = await Cluster.start(B1, B2, *others)
    await cluster.write_ledger((B1, B2), write_quorum=2, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B2)
    return cluster


@pytest.mark.parametrize("accepts_loss", [False, True])
@in_virtual_time
async def test_while_nobody_can_take_its_last_entries_nothing_is_begun(accepts_loss: bool) -> None:
    cluster = await acknowledged_by_both_of_two()
    fenced = watch_fencing(cluster)

    with pytest.raises(CloseRefusedError) as caught:
        await close(cluster, is_forced=True, accepts_loss=accepts_loss)

    assert (
        f"no answer from {B2} (not registered), and recovery must store the last entries on 2"
        in str(caught.value)
    )
    assert f"Start {B2}, or add a bookie. Then give the same command again" in str(caught.value)
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert await cluster.locked() == []


@in_virtual_time
async def test_a_look_says_so_too() -> None:
    cluster = await acknowledged_by_both_of_two()

    shown = closing_text(await (await closer(cluster)).look(LEDGER), is_forced=True).splitlines()

    assert shown[-1].startswith("nothing was changed: it cannot be closed now, forced or not")
    assert not any("--yes" in line for line in shown)


@in_virtual_time
async def test_with_a_bookie_that_can_take_over_it_is_closed() -> None:
    cluster = await acknowledged_by_both_of_two(B3)

    done = await close(cluster, is_forced=True)

    assert done.closed is not None
    assert done.closed.metadata.last_entry_id == 9


@in_virtual_time
async def test_one_that_got_no_entry_yet_needs_nobody_to_take_any() -> None:
    cluster = await Cluster.start(B1, B2)
    await cluster.write_ledger(
        (B1, B2), write_quorum=2, ack_quorum=2, last=-1, state=LedgerState.OPEN
    )
    await cluster.kill(B2)

    done = await close(cluster, is_forced=True)

    assert done.closed is not None
    assert done.closed.metadata.last_entry_id == -1


@in_virtual_time
async def test_nor_does_one_whose_last_entries_are_on_others_of_its_bookies() -> None:
    """Of three bookies, two a write set, entry 9 is on the first two, and the third is away."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3), write_quorum=2, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B3)

    done = await close(cluster, is_forced=True)

    assert done.closed is not None
    assert done.closed.metadata.last_entry_id == 9


@in_virtual_time
async def test_but_of_all_that_are_not_confirmed_the_last_alone_does_not_decide() -> None:
    """Entry 8, on the third one and the first, has to be written again, too."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger(
        (B1, B2, B3), write_quorum=2, ack_quorum=2, last=7, state=LedgerState.OPEN
    )
    cluster.put(LEDGER, 8, B3, B1, lac=6)
    cluster.put(LEDGER, 9, B1, B2, lac=6)
    await cluster.kill(B3)

    with pytest.raises(CloseRefusedError, match=f"Start {B3}, or add a bookie"):
        await close(cluster, is_forced=True)


@pytest.mark.parametrize(
    ("write_quorum", "ack_quorum", "silent", "told"),
    [
        pytest.param(3, 2, (B2, B3), f"start {B2} or {B3} (", id="one of them will do"),
        pytest.param(
            3, 1, (B2, B3), f"start {B2} and {B3} (", id="each may have acknowledged alone"
        ),
        pytest.param(
            3, 2, (B1, B2, B3), f"start enough of {B1}, {B2}, {B3} (", id="two of the three will do"
        ),
    ],
)
@in_virtual_time
async def test_whom_to_start_so_that_its_end_can_be_found(
    write_quorum: int, ack_quorum: int, silent: tuple[BookieId, ...], told: str
) -> None:
    cluster = await Cluster.start()
    versioned = await cluster.write_ledger(
        (B1, B2, B3), write_quorum=write_quorum, ack_quorum=ack_quorum, state=LedgerState.OPEN
    )

    assert whom_to_start(versioned.metadata, frozenset(silent)).startswith(told)


@in_virtual_time
async def test_bookies_that_fail_in_the_midst_of_it_leave_word_of_what_was_done_and_what_is_next() -> (
    None
):
    cluster = await acknowledged_by_two_of_three()
    await remember(cluster, {LEDGER: LastChange(last_entry_id=9, since_ms=cluster.clock.wall_ms())})
    await asyncio.sleep(DAY_S)
    for bookie in (B2, B3):
        cluster.bookies.fail(bookie, Op.READ_FENCING, Fault(error=UnavailableError))

    with pytest.raises(UnavailableError) as caught:
        await close(cluster)

    assert f"fenced={B1}, replies=" in str(caught.value)
    assert "it is IN_RECOVERY now, and what was fenced takes nothing" in str(caught.value)
    assert str(caught.value).endswith("its bookies answer now: give the same command again")
    assert await cluster.locked() == []

    cluster.bookies.fail(B2, Op.READ_FENCING, NO_FAULT)
    done = await close(
        cluster
    )  # its writer is locked out: the same words do, though the metadata was written

    assert done.closed is not None


@in_virtual_time
async def test_where_too_few_answer_even_for_that_it_is_said_which_are_to_be_started_first() -> (
    None
):
    """Entries were acknowledged by two of three: so two of them have to answer, be it that they
    have nothing."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    for bookie in (B1, B2, B3):
        await cluster.kill(bookie)
    await cluster.wipe(B1)
    await cluster.revive(B1)

    for accepts_loss in (False, True):
        with pytest.raises(CloseRefusedError, match=f"start {B2} or {B3} "):
            await close(cluster, is_forced=True, accepts_loss=accepts_loss)
    await cluster.revive(B2)
    with pytest.raises(CloseRefusedError, match=f"Start {B3}. If they never return"):
        await close(cluster, is_forced=True)
    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.closed is not None
    assert done.closed.metadata.last_entry_id == 9
