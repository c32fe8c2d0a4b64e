"""Open ledgers without a good copy of their last entries, which an operator may give up."""

import pytest

from daemon.messages import message
from daemon.operations.close import CloseRefusedError
from ledgers.errors import UnreadableError
from ledgers.model import LedgerState
from replication.ledger_record import read_given_up
from replication.reasons import Reason
from tests.daemon.closing import close
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.repairs import blocked_by


async def with_damage(*damaged: int, last: int = 5) -> Cluster:
    """Return a cluster with three copies of each entry.

    Those of ``damaged`` have a wrong digest.
    """
    cluster = await Cluster.start()
    await cluster.write_ledger(
        (B1, B2, B3), last=-1, write_quorum=3, ack_quorum=2, state=LedgerState.OPEN
    )
    for entry_id in range(last + 1):
        cluster.put(LEDGER, entry_id, B1, B2, B3, lac=-1)  # none of them is known to be confirmed
    for entry_id in damaged:
        for bookie in (B1, B2, B3):
            cluster.bookie(bookie).corrupt(LEDGER, entry_id)
    return cluster


@pytest.mark.parametrize("is_one_lost", [False, True], ids=["all registered", "one bookie lost"])
@in_virtual_time
async def test_an_operator_can_give_up_an_entry_without_a_good_copy(
    is_one_lost: bool,
) -> None:
    cluster = await with_damage(5)
    if is_one_lost:
        await cluster.kill(B3)

    done = await close(cluster, is_forced=True, accepts_loss=True)

    assert done.has_changed
    assert done.last_entry_id == 4


@in_virtual_time
async def test_without_accept_loss_the_closing_is_refused() -> None:
    """The refusal names the option that gives up the damaged entries."""
    cluster = await with_damage(5)

    with pytest.raises(CloseRefusedError, match="--accept-loss --force` shows which entries"):
        await close(cluster, is_forced=True)

    assert not (await cluster.metadata()).is_closed


@in_virtual_time
async def test_a_worker_refuses_with_a_reason() -> None:
    cluster = await with_damage(5)
    await cluster.kill(B3)
    await cluster.mark(B3)
    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)

        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.reason is Reason.END_DAMAGED
    assert outcome.reason.needs_help
    assert "--accept-loss --force`" in message(LEDGER, blocked_by(outcome)).advice
    assert not (await cluster.metadata()).is_closed


@pytest.mark.parametrize(
    ("damaged", "end"),
    [
        pytest.param((5,), 4, id="the last one"),
        pytest.param((3, 4, 5), 2, id="several at the end"),
        pytest.param((4,), 3, id="one before a good one, which is given up too"),
        pytest.param((0, 1, 2, 3, 4, 5), -1, id="all of them"),
    ],
)
@in_virtual_time
async def test_the_ledger_ends_before_its_first_damaged_entry(
    damaged: tuple[int, ...], end: int
) -> None:
    cluster = await with_damage(*damaged)

    await close(cluster, is_forced=True, accepts_loss=True)

    assert (await cluster.metadata()).last_entry_id == end
    given_up = (await read_given_up(cluster.store, PATHS, LEDGER)).value
    assert given_up is not None
    assert (given_up.first_entry_id, given_up.last_entry_id) == (end + 1, 5)
    assert "@" in given_up.by
    assert f"{B1}: digest mismatch" in given_up.replies


@in_virtual_time
async def test_with_one_good_copy_nothing_is_given_up() -> None:
    cluster = await with_damage()
    for bookie in (B1, B2):
        cluster.bookie(bookie).corrupt(LEDGER, 5)

    await close(cluster, is_forced=True, accepts_loss=True)

    assert (await cluster.metadata()).last_entry_id == 5
    assert (await read_given_up(cluster.store, PATHS, LEDGER)).value is None


@in_virtual_time
async def test_an_entry_that_no_bookie_can_read_is_given_up_too() -> None:
    cluster = await with_damage(last=5)
    read_fencing = cluster.bookies.read_fencing

    async def fail_on_5(*args: object, **options: object) -> bytes:
        if 5 in args:
            raise UnreadableError("I/O error")
        return await read_fencing(*args, **options)  # type: ignore[arg-type]

    cluster.bookies.read_fencing = fail_on_5  # type: ignore[method-assign]

    await close(cluster, is_forced=True, accepts_loss=True)

    assert (await cluster.metadata()).last_entry_id == 4


@in_virtual_time
async def test_damage_beyond_a_proven_end_is_not_given_up() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger(
        (B1, B2, B3), last=4, write_quorum=3, ack_quorum=2, state=LedgerState.OPEN
    )
    for bookie in (B1, B2, B3):
        cluster.put(LEDGER, 6, bookie)  # 5 was never written
        cluster.bookie(bookie).corrupt(LEDGER, 6)

    await close(cluster, is_forced=True, accepts_loss=True)

    assert (await cluster.metadata()).last_entry_id == 4
    assert (await read_given_up(cluster.store, PATHS, LEDGER)).value is None
