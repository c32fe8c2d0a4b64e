"""Other bookies are asked before a verdict, and a recheck corrects it."""

from dataclasses import replace
from typing import Any

import pytest

from auditor.fsck.executor import inspect_ledger, recheck_ledger
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.bookies import Transfer
from ledgers.digest import EntryDigest
from ledgers.errors import BusyError, NoAnswerError, UnreadableError
from ledgers.model import BookieId, DigestType, Segment
from ledgers.secret import Secret
from tests.fsck.inspections import (
    ALL,
    executor,
    inspect_many,
    inspect_once,
    inspect_twice,
    lose,
    one_ledger,
    options,
    told,
)
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import WRONG_DIGEST, Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER

_, ENDS, SAMPLE, FULL = Level
WHOLE = (Grade.WHOLE, ())
where_read = pytest.mark.parametrize("level", [ENDS, SAMPLE, FULL], ids=lambda level: level.value)


# --- Former members -------------------------------------------------------------------------------


@in_virtual_time
async def test_a_former_member_is_asked_before_an_entry_is_lost() -> None:
    cluster, metadata = await one_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 5), last=9)
    lose(cluster, metadata, 2, 3)
    cluster.put(LEDGER, 2, B4)

    verdict = await inspect_twice(cluster)

    assert told(verdict) == (Grade.AT_RISK, (Finding.MISSING, Finding.STRAY))
    assert verdict is not None
    cure = next(each for each in verdict.evidence if each.code == "only_copy")
    assert (cure.bookie, cure.first_entry_id, cure.last_entry_id) == (B4, 2, 2)


@in_virtual_time
async def test_every_other_bookie_is_asked_at_the_recheck() -> None:
    """No metadata names a bookie that a repair replaced."""
    cluster, metadata = await one_ledger()
    for entry_id in (2, 3):
        lose(cluster, metadata, entry_id, 3)
        cluster.put(LEDGER, entry_id, B5)

    first = await inspect_once(cluster)
    last = await recheck_ledger(await executor(cluster, options()), first)

    assert told(first) == (Grade.LOST, (Finding.MISSING,))
    assert told(last) == (Grade.AT_RISK, (Finding.MISSING, Finding.STRAY))


@in_virtual_time
async def test_an_entry_that_no_bookie_has_is_lost() -> None:
    """A former member has another entry."""
    cluster, metadata = await one_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 5), last=9)
    for entry_id in (2, 3):
        lose(cluster, metadata, entry_id, 3)
    cluster.put(LEDGER, 2, B4)

    assert told(await inspect_twice(cluster)) == (Grade.LOST, (Finding.MISSING, Finding.STRAY))


@in_virtual_time
async def test_copies_on_former_members_are_not_wrong() -> None:
    """Level full reports them."""
    cluster, _ = await one_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 5), last=9)
    cluster.put(LEDGER, 5, B2)

    verdict = await inspect_once(cluster)

    assert told(verdict) == (Grade.WHOLE, (Finding.STRAY,))
    assert not verdict.is_wrong
    assert told(await inspect_once(cluster, ENDS)) == WHOLE


# --- The recheck ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_ledger_repaired_since_is_whole() -> None:
    cluster, _ = await one_ledger()
    cluster.bookie(B1).lose(LEDGER, 0)
    first = await inspect_once(cluster)

    cluster.put(LEDGER, 0, B1)

    assert told(first) == (Grade.DEGRADED, (Finding.MISSING,))
    assert told(await recheck_ledger(await executor(cluster, options()), first)) == WHOLE


@in_virtual_time
async def test_a_ledger_moved_since_is_read_from_its_new_bookies() -> None:
    cluster, _ = await one_ledger()
    cluster.bookie(B1).wipe()
    first = await inspect_once(cluster)

    for entry_id in range(10):
        cluster.put(LEDGER, entry_id, B4)
    await rewrite(cluster, segments=(Segment(first_entry_id=0, ensemble=(B4, B2, B3)),))

    assert told(await recheck_ledger(await executor(cluster, options()), first)) == WHOLE


@in_virtual_time
async def test_a_deleted_ledger_has_no_verdict() -> None:
    cluster, _ = await one_ledger()
    cluster.bookie(B1).wipe()
    made = await executor(cluster, options())
    first = await inspect_ledger(made, LEDGER)
    assert first is not None

    await cluster.manager.delete(LEDGER, version=0)

    assert await recheck_ledger(made, first) is None
    assert await inspect_ledger(made, LEDGER) is None


@in_virtual_time
async def test_a_ledger_deleted_during_the_recheck_has_no_verdict() -> None:
    cluster, _ = await one_ledger()
    cluster.bookie(B1).wipe()
    first = await inspect_once(cluster)

    async def delete(transfer: Transfer) -> None:
        cluster.bookies.before_transfer = None
        await cluster.manager.delete(LEDGER, version=0)
        for bookie in ALL:
            cluster.bookie(bookie).collect(LEDGER)

    cluster.bookies.before_transfer = delete

    assert await recheck_ledger(await executor(cluster, options()), first) is None


@in_virtual_time
async def test_changing_metadata_is_rechecked_and_finally_given_up() -> None:
    cluster, _ = await one_ledger()
    cluster.bookie(B1).wipe()
    first = await inspect_once(cluster)
    change_count = 0

    async def change(transfer: Transfer) -> None:
        nonlocal change_count
        change_count += 1
        await rewrite(cluster, c_token=change_count)

    cluster.bookies.before_transfer = change
    given_up = await recheck_ledger(await executor(cluster, options()), first)
    cluster.bookies.before_transfer = None
    settled = await recheck_ledger(await executor(cluster, options()), first)

    assert given_up is not None
    assert (given_up.grade, given_up.rests_on_unknown) == (Grade.UNKNOWN, True)
    assert told(settled) == (Grade.DEGRADED, (Finding.MISSING,))


@in_virtual_time
async def test_the_recheck_comes_some_time_after_the_first_check() -> None:
    cluster, _ = await one_ledger()
    cluster.bookie(B1).wipe()
    first = await inspect_once(cluster)
    since_s = cluster.clock.now_s()

    await recheck_ledger(await executor(cluster, options()), first)

    assert cluster.clock.now_s() - since_s >= 2


# --- Uncertain answers ----------------------------------------------------------------------------


@where_read
@in_virtual_time
async def test_a_read_error_that_is_over_does_not_count(level: Level) -> None:
    cluster, _ = await one_ledger()
    failures = iter([UnreadableError, BusyError, UnreadableError, None, BusyError])

    def faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        return Fault(error=next(failures, None) if (bookie, op) == (B2, Op.READ) else None)

    cluster.bookies.faults = faults

    assert told(await inspect_once(cluster, level)) == WHOLE


@in_virtual_time
async def test_a_bookie_that_hangs_is_waited_for_once() -> None:
    cluster = await Cluster.start()
    for ledger_id in range(40):
        await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
    cluster.bookies.fail(B2, Op.READ, Fault(error=NoAnswerError))

    found = await inspect_many(cluster, range(40))

    assert {told(verdict) for verdict in found.values()} == {
        (Grade.UNKNOWN, (Finding.NOT_ANSWERED,))
    }
    asked = [t for t, _ in cluster.bookies.transfers if B2 in t.reads]
    assert len(asked) < 40


@in_virtual_time
async def test_a_wrong_default_key_proves_nothing() -> None:
    cluster, _ = await one_ledger(
        digest=WRONG_DIGEST, password=None, digest_type=None, metadata_version=1, ack_quorum=3
    )

    verdict = await inspect_twice(cluster)

    assert verdict is not None
    assert (verdict.grade, verdict.rests_on_unknown) == (Grade.UNKNOWN, True)
    assert "wrong_key" in {each.code for each in verdict.evidence}
    assert not verdict.is_wrong


@in_virtual_time
async def test_a_wrong_default_key_does_not_name_bookies_to_start() -> None:
    cluster, _ = await one_ledger(
        digest=WRONG_DIGEST, password=None, digest_type=None, metadata_version=1, ack_quorum=3
    )
    await cluster.kill(B1)

    verdict = await inspect_twice(cluster)

    assert verdict is not None
    assert Finding.BOOKIE_GONE in verdict.findings
    assert verdict.bookies_to_start == frozenset()


@in_virtual_time
async def test_the_default_key_reads_ledgers_without_a_key() -> None:
    digest = EntryDigest(DigestType.HMAC, b"default")
    cluster, _ = await one_ledger(
        digest=digest, password=None, digest_type=None, metadata_version=1, ack_quorum=3
    )
    key: dict[str, Any] = {"default_password": Secret("default"), "default_digest_type": "HMAC"}

    assert told(await inspect_once(cluster, **key)) == WHOLE


async def rewrite(cluster: Cluster, **changes: object) -> None:
    """Write the ledger's metadata as another client would."""
    versioned = await cluster.manager.read(LEDGER)
    changed = replace(versioned.metadata, **changes)  # type: ignore[arg-type]
    await cluster.manager.write(LEDGER, changed, read_as=versioned)
