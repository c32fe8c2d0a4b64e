"""Recovery with bookies that lost acknowledged entries: the rest is found, and saved."""

import pytest
from structlog.testing import capture_logs

from ledgers.bookies import LAST_ENTRY
from ledgers.errors import FencedError, UnavailableError, UnprovenEndError
from ledgers.model import LedgerState
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import LEDGER_ID, A, B, C, MemoryCluster
from tests.replication.cluster import in_virtual_time


@pytest.mark.parametrize("ack_quorum", [2, 3])
@in_virtual_time
async def test_a_bookie_that_may_have_the_last_entries_is_waited_for(ack_quorum: int) -> None:
    """A and B lost the ledger's index, not their identity: they deny at once, and C is slow."""
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], ack_quorum=ack_quorum, entries=range(4), on=[C]
    )

    async def answer_late(call: Call) -> None:
        await cluster.clock.sleep(0.3 if call.bookie == C else 0.0)

    cluster.bookies.before = answer_late

    assert (await cluster.recover()).last_entry_id == 3
    assert cluster.stored_on(3) == {A, B, C}


@in_virtual_time
async def test_unreadable_entries_after_the_end_delay_nothing() -> None:
    """They are logged."""
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[C])

    async def spoil(call: Call) -> None:
        if (call.bookie, call.entry_id) == (C, 0):
            raise UnavailableError("EIO")

    cluster.bookies.before = spoil

    with capture_logs() as logs:
        assert (await cluster.recover()).last_entry_id == -1

    told = next(line for line in logs if line["event"] == "recovery.entries_excluded")
    assert (told["ledger_id"], told["last_entry_id"], told["shown"]) == (LEDGER_ID, -1, {C: 0})


@pytest.mark.parametrize("lac", [-1, 1], ids=["nothing known", "up to entry 1 known"])
@in_virtual_time
async def test_remaining_entries_are_copied_without_a_provable_end(lac: int) -> None:
    """A and B were reformatted. C has four entries; what A and B acknowledged is unknown."""
    cluster = await MemoryCluster.with_ledger([A, B, C])
    for entry_id in range(4):
        await cluster.put(entry_id, C, lac=min(lac, entry_id - 1))

    with (
        capture_logs() as logs,
        pytest.raises(UnprovenEndError, match="0 to 3 remain; their copies are restored"),
    ):
        await cluster.recover(reformatted={A, B})

    assert [(line["event"], line["ledger_id"]) for line in logs] == [
        ("recovery.end_unproven", LEDGER_ID)
    ]
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    for entry_id in range(4):
        assert cluster.stored_on(entry_id) == {A, B, C}, entry_id


@in_virtual_time
async def test_saved_entries_are_not_sent_again() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=range(4), on=[C])

    for _ in range(2):
        with pytest.raises(UnavailableError, match="0 to 3 remain"):
            await cluster.recover(reformatted={A, B})

    assert len(cluster.bookies.called("add")) == 8


@in_virtual_time
async def test_a_bookie_that_refuses_a_copy_keeps_none_from_others() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=range(4), on=[C])

    async def refuse(call: Call) -> None:
        if call.operation == "add" and call.bookie == B:
            raise FencedError("deleted here")

    cluster.bookies.before = refuse

    with pytest.raises(UnavailableError, match=f"their copies are restored, except on {B}"):
        await cluster.recover(reformatted={A, B})

    assert all(cluster.stored_on(entry_id) == {A, C} for entry_id in range(4)), (
        "no bookie replaces it"
    )


# --- Unresponsive bookies -------------------------------------------------------------------------


@in_virtual_time
async def test_a_reformatted_bookie_gets_entries_while_another_is_lost() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=range(4), on=[C])
    cluster.down = {B}

    with pytest.raises(UnavailableError, match="could be fenced; entries 0 to 3 remain"):
        await cluster.recover(reformatted={A})

    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert all(cluster.stored_on(entry_id) == {A, C} for entry_id in range(4))


@in_virtual_time
async def test_nothing_is_read_again_if_no_bookie_was_reformatted() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[C])
    cluster.down = {A, B}

    with pytest.raises(UnavailableError, match="could be fenced"):
        await cluster.recover()

    assert {call.entry_id for call in cluster.bookies.called("read_fencing")} == {LAST_ENTRY}
