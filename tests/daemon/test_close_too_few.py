"""Closing an open ledger by hand while too few bookies answer: it is refused with advice."""

import asyncio

import pytest

from auditor.checks.idle import LastChange
from daemon.operations.close import CloseRefusedError, whom_to_start
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState
from tests.daemon.closing import DAY_S, close, remember
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER
from tests.replication.repairs import watch_fencing


async def acknowledged_by_two_of_three() -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    return cluster


@pytest.mark.parametrize("accepts_loss", [False, True])
@pytest.mark.parametrize("is_absent", [True, False], ids=["absent", "unresponsive"])
@in_virtual_time
async def test_rule_s5_too_few_answering_bookies_stop_the_closing(
    is_absent: bool, accepts_loss: bool
) -> None:
    cluster = await acknowledged_by_two_of_three()
    for bookie in (B2, B3):
        cluster.bookie(bookie).is_down = True
        if is_absent:
            await cluster.kill(bookie)
    fenced = watch_fencing(cluster)
    why = "not registered" if is_absent else "registered, but unresponsive"

    with pytest.raises(CloseRefusedError) as caught:
        await close(cluster, is_forced=True, accepts_loss=accepts_loss)

    assert f"no answer from {B2} ({why}), {B3} ({why})" in str(caught.value)
    assert f"Start {B2} or {B3} (even without their data)" in str(caught.value)
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert await cluster.locked() == []


@in_virtual_time
async def test_rule_s5_answers_of_unregistered_bookies_do_not_count() -> None:
    cluster = await acknowledged_by_two_of_three()
    await cluster.kill(B3)
    await cluster.unregister(B2)  # it still answers, or another bookie does at its address

    with pytest.raises(CloseRefusedError, match=f"no answer from {B2} .not registered."):
        await close(cluster, is_forced=True)

    assert (await cluster.metadata()).state is LedgerState.OPEN


# --- Too few bookies for the last entries ---------------------------------------------------------


async def acknowledged_by_both_of_two(*others: BookieId) -> Cluster:
    """Return a cluster in which B2 is absent. ``others``: further registered bookies."""
    cluster = await Cluster.start(B1, B2, *others)
    await cluster.write_ledger((B1, B2), write_quorum=2, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B2)
    return cluster


@pytest.mark.parametrize("accepts_loss", [False, True])
@in_virtual_time
async def test_without_a_bookie_for_its_last_entries_none_is_fenced(accepts_loss: bool) -> None:
    cluster = await acknowledged_by_both_of_two()
    fenced = watch_fencing(cluster)

    with pytest.raises(CloseRefusedError) as caught:
        await close(cluster, is_forced=True, accepts_loss=accepts_loss)

    assert (
        f"no answer from {B2} (not registered). Also, recovery must store the last entries on 2"
        in str(caught.value)
    )
    assert f"Start {B2}, or add a bookie. Then run this command again" in str(caught.value)
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN
    assert await cluster.locked() == []


@in_virtual_time
async def test_with_a_replacement_bookie_the_ledger_is_closed() -> None:
    cluster = await acknowledged_by_both_of_two(B3)

    done = await close(cluster, is_forced=True)

    assert (done.has_changed, done.last_entry_id) == (True, 9)


@pytest.mark.parametrize(
    ("ensemble", "last"),
    [
        pytest.param((B1, B2), -1, id="an empty ledger needs no replacement"),
        pytest.param((B3, B1, B2), 9, id="its last entry is elsewhere"),
    ],
)
@in_virtual_time
async def test_a_bookie_without_the_last_entries_may_be_absent(
    ensemble: tuple[BookieId, ...], last: int
) -> None:
    """With three bookies and two copies, entry 9 is on the first two."""
    cluster = await Cluster.start(*ensemble)
    await cluster.write_ledger(
        ensemble, write_quorum=2, ack_quorum=2, last=last, state=LedgerState.OPEN
    )
    await cluster.kill(B2)

    done = await close(cluster, is_forced=True)

    assert (done.has_changed, done.last_entry_id) == (True, last)


@in_virtual_time
async def test_every_unconfirmed_entry_needs_its_bookies() -> None:
    """Recovery must also write entry 8 again, on the third and the first bookie."""
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
    ("write_quorum", "ack_quorum", "unresponsive", "told"),
    [
        pytest.param(3, 2, (B2, B3), f"Start {B2} or {B3} (", id="one of them is enough"),
        pytest.param(
            3, 1, (B2, B3), f"Start {B2} and {B3} (", id="each may have acknowledged alone"
        ),
        pytest.param(
            3,
            2,
            (B1, B2, B3),
            f"Start enough of {B1}, {B2}, {B3} (",
            id="two of the three are enough",
        ),
    ],
)
@in_virtual_time
async def test_the_bookies_to_start_are_named(
    write_quorum: int, ack_quorum: int, unresponsive: tuple[BookieId, ...], told: str
) -> None:
    cluster = await Cluster.start()
    versioned = await cluster.write_ledger(
        (B1, B2, B3), write_quorum=write_quorum, ack_quorum=ack_quorum, state=LedgerState.OPEN
    )

    assert whom_to_start(versioned.metadata, frozenset(unresponsive)).startswith(told)


@in_virtual_time
async def test_a_failure_during_recovery_says_what_to_do_next() -> None:
    """The error says what was fenced, and that the same command can be given again."""
    cluster = await acknowledged_by_two_of_three()
    await remember(cluster, {LEDGER: LastChange(last_entry_id=9, since_ms=cluster.clock.wall_ms())})
    await asyncio.sleep(DAY_S)
    for bookie in (B2, B3):
        cluster.bookies.fail(bookie, Op.READ_FENCING, Fault(error=UnavailableError))

    with pytest.raises(UnavailableError) as caught:
        await close(cluster)

    assert f"fenced={B1}, replies=" in str(caught.value)
    assert "The ledger is IN_RECOVERY now, and fenced bookies refuse its writer." in str(
        caught.value
    )
    assert str(caught.value).endswith("Its bookies answer now: run this command again")
    assert await cluster.locked() == []

    cluster.bookies.fail(B2, Op.READ_FENCING, NO_FAULT)
    # The writer is fenced, so the same command works, although the metadata has changed.
    done = await close(cluster)

    assert done.has_changed


@in_virtual_time
async def test_accept_loss_needs_an_ack_quorum_of_answers() -> None:
    """Two of three acknowledged each entry, so two must answer, even with nothing to show."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    for bookie in (B1, B2, B3):
        await cluster.kill(bookie)
    await cluster.wipe(B1)
    await cluster.revive(B1)

    for accepts_loss in (False, True):
        with pytest.raises(CloseRefusedError, match=f"Start {B2} or {B3} "):
            await close(cluster, is_forced=True, accepts_loss=accepts_loss)
    await cluster.revive(B2)
    with pytest.raises(CloseRefusedError, match=f"Start {B3}. If they never return"):
        await close(cluster, is_forced=True)
    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.has_changed
    assert done.last_entry_id == 9
