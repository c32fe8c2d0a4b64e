"""Small ledgers are copied while their bookies prove that all other entries exist
(``Inspector.inspect_optimistically``)."""

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import BookmenderError, BusyError, RejectedError, UnavailableError
from ledgers.model import BookieId
from replication.inspection import SMALL_ENTRIES
from replication.reasons import Reason
from replication.repair import OutcomeKind
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import WRONG_DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER
from tests.replication.repairs import assert_still_marked, lost_b2, once_copied, repair, touch


def copies(cluster: Cluster) -> list[Transfer]:
    return [transfer for transfer, _ in cluster.bookies.transfers if transfer.target is not None]


@pytest.mark.parametrize("write_quorum", [2, 3])
async def test_a_small_ledger_needs_one_transfer_for_check_and_copy(
    cluster: Cluster,
    write_quorum: int,
) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=write_quorum)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert len(cluster.bookies.transfers) == 1
    stored = {B1: (0, 9), B3: (0, 9)} if write_quorum == 3 else {B1: (0, 9), B3: (1, 8)}
    for bookie, ends in stored.items():
        assert set(ends) <= set(cluster.bookies.asked(bookie)), "as a check would have asked"
    await cluster.assert_whole()


@pytest.mark.parametrize("entry_count", [SMALL_ENTRIES, SMALL_ENTRIES + 1])
async def test_a_larger_one_is_checked_first(cluster: Cluster, entry_count: int) -> None:
    await cluster.write_ledger((B1, B2, B3), last=entry_count - 1)
    await cluster.kill(B2)

    await repair(cluster)

    is_checked_first = cluster.bookies.transfers[0][0].target is None
    assert is_checked_first == (entry_count > SMALL_ENTRIES)
    await cluster.assert_whole()


@pytest.mark.parametrize("entry_id", [0, 4, 9])
@pytest.mark.parametrize("damage", ["lose", "corrupt"])
@pytest.mark.parametrize("bookie", [B1, B3])
async def test_further_losses_are_repaired_without_a_second_copy(
    cluster: Cluster, bookie: BookieId, damage: str, entry_id: int
) -> None:
    """The check finds them."""
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    getattr(cluster.bookie(bookie), damage)(LEDGER, entry_id)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    copied = outcome.entry_count
    assert copied <= 20, "the lost index, and at most the other one"
    assert copied >= 10
    is_asked = entry_id in (0, 9) or bookie == B3  # B3 is the source
    if is_asked:
        await cluster.assert_whole()
    assert B2 not in (await cluster.metadata()).bookies


async def test_a_source_that_does_not_answer_keeps_the_mark() -> None:
    cluster = await lost_b2()
    cluster.bookies.fail(B3, Op.READ, Fault(delay_s=5, error=UnavailableError))

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_ANSWER
    await assert_still_marked(cluster)


async def test_changed_metadata_does_not_cause_a_second_copy() -> None:
    cluster = await lost_b2()
    once_copied(cluster, lambda _: touch(cluster))

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert len(copies(cluster)) == 1, "the target has it already"
    await cluster.assert_whole()


async def test_if_no_digest_matches_nothing_is_written(cluster: Cluster) -> None:
    """The key is suspected."""
    await cluster.write_ledger((B1, B2, B3), digest=WRONG_DIGEST)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.DIGEST_SUSPECT
    assert not cluster.bookie(B4).entry_ids(LEDGER)


@pytest.mark.parametrize("error", [BusyError, RejectedError], ids=["busy", "refuses"])
@pytest.mark.parametrize("bookie", [B1, B3])
async def test_a_failing_target_leaves_unread_entries_unproven(
    cluster: Cluster, bookie: BookieId, error: type[BookmenderError]
) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(bookie).lose(LEDGER, 9)
    await cluster.kill(B2)
    has_failed = False

    def fail_once(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        nonlocal has_failed
        if op is not Op.ADD or has_failed:
            return NO_FAULT
        has_failed = True
        return Fault(error=error)

    cluster.bookies.faults = fail_once

    outcome = await repair(cluster)

    assert has_failed
    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()
