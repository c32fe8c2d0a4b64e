"""Repairs of closed ledgers, on bookies and a ZooKeeper in memory."""

from dataclasses import replace
from typing import Any

import pytest

from ledgers.bookies import Answer
from ledgers.errors import UnavailableError
from ledgers.memory_bookies import Fault, Op
from ledgers.metadata import BookieId
from ledgers.metadata_codec import parse_metadata, serialize_metadata
from replication.outcome import DONE, Outcome, OutcomeKind
from replication.plan import Reason
from replication.settings import ReplicationSettings
from tests.replication.cluster import (
    ENTRY_BYTES,
    WRONG_DIGEST,
    Cluster,
    in_virtual_time,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, Node

VERSION_1: dict[str, Any] = {
    "metadata_version": 1,
    "password": None,
    "digest_type": None,
    "ack_quorum": 2,
    "has_ack_quorum": False,
}
"""What such metadata holds, and does not."""


async def repair_marked(cluster: Cluster, node: Node) -> Outcome:
    """Take the marked ledger and repair it."""
    return await node.repairer.repair(await node.take())


async def repair(cluster: Cluster, **options: object) -> Outcome:
    """Mark the ledger, and let a node repair it; its lock goes with the node's session."""
    if not await cluster.marked():
        await cluster.mark()
    async with cluster.node(**options) as node:  # type: ignore[arg-type]
        return await repair_marked(cluster, node)


async def assert_still_marked(cluster: Cluster) -> None:
    assert await cluster.marked() == [LEDGER]


# --- What is lost ---------------------------------------------------------------------------------


@in_virtual_time
async def test_a_lost_bookie_is_replaced_by_one_that_got_just_its_entries() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    outcome = await repair(cluster)

    [(first, target, third)] = await cluster.ensembles()
    assert (first, third) == (B1, B3)
    assert cluster.bookie(target).entry_ids(LEDGER) == {0, 1, 3, 4, 6, 7, 9}
    assert outcome == replace(DONE, entry_count=7, entry_bytes=7 * ENTRY_BYTES)
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_everything_lost_is_written_in_one_compare_and_set() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), (B4, B1, B5), starts=(0, 10, 20), last=29, write_quorum=3
    )
    await cluster.kill(B1, B3)

    outcome = await repair(cluster)

    after = await cluster.manager.read(LEDGER)
    assert after.version == before.version + 1
    assert not after.metadata.bookies & {B1, B3}
    assert outcome.kind is OutcomeKind.DONE
    assert outcome.entry_count == 30 + 20
    await cluster.assert_whole()


@pytest.mark.parametrize(
    ("ensemble", "write_quorum", "lost"),
    [
        pytest.param((B1,), 1, (), id="nothing lost, one copy"),
        pytest.param((B1, B2), 2, (B2,), id="E 2, W 2"),
        pytest.param((B1, B2, B3), 3, (B1, B3), id="all but the last copy"),
        pytest.param((B1, B2, B3, B4), 2, (B1, B3), id="W < E, lost ones that share nothing"),
        pytest.param((B1, B2, B3, B4, B5), 3, (B2, B3), id="W < E, lost neighbours"),
    ],
)
@in_virtual_time
async def test_every_shape_is_whole_afterwards_and_no_byte_too_many_was_copied(
    ensemble: tuple[BookieId, ...], write_quorum: int, lost: tuple[BookieId, ...]
) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger(ensemble, write_quorum=write_quorum, last=20)
    await cluster.kill(*lost)
    lost_count = sum(len(cluster.bookie(b).entry_ids(LEDGER)) for b in lost)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert (outcome.entry_count, outcome.entry_bytes) == (lost_count, lost_count * ENTRY_BYTES)
    assert cluster.bookies.copied_count == lost_count
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@pytest.mark.parametrize("last", [-1, 0], ids=["an empty ledger", "a single entry"])
@in_virtual_time
async def test_small_ledgers_lose_their_lost_bookies_too(last: int) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=last)
    await cluster.kill(B3)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert outcome.entry_count == 0  # B3 stores entry 1 first
    assert B3 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_an_empty_fragment_at_the_end_is_taken_along() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=9)
    await cluster.kill(B4)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    assert B4 not in (await cluster.metadata()).bookies
    assert cluster.bookies.copied_count == 0


@in_virtual_time
async def test_a_whole_ledger_is_only_unmarked() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2, B3))

    outcome = await repair(cluster)

    assert outcome == DONE
    assert (await cluster.manager.read(LEDGER)).version == before.version
    assert cluster.bookies.copied_count == 0
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_a_read_only_bookie_is_a_source_and_no_loss() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)
    await cluster.kill(B2)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    assert (await cluster.ensembles())[0][0] == B1
    await cluster.assert_whole()


# --- Metadata -------------------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s2_a_repair_changes_the_ensembles_and_nothing_else() -> None:
    cluster = await Cluster.start()
    written = await cluster.write_ledger(
        (B1, B2, B3),
        ack_quorum=2,
        custom=(("app", b"\x00"), ("other", b"y")),
        ctime_ms=1234,
        c_token=99,
        unknown_fields=b"\xa2\x06\x03abc",  # field 100, of a later BookKeeper
    )
    before = replace(
        written.metadata,
        segments=(replace(written.metadata.segments[0], unknown_fields=b"\xa2\x06\x01z"),),
    )
    await cluster.manager.write(LEDGER, before, read_as=written)
    await cluster.kill(B2)

    await repair(cluster)

    after = await cluster.metadata()
    [segment] = after.segments
    assert after == replace(
        before, segments=(replace(before.segments[0], ensemble=segment.ensemble),)
    )
    assert segment.ensemble != (B1, B2, B3)


@in_virtual_time
async def test_rule_s2_the_journal_has_the_bytes_before_and_after() -> None:
    cluster = await Cluster.start()
    written = await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    lines: list[tuple[int, bytes, bytes]] = []

    await repair(cluster, journal=lambda *line: lines.append(line))

    assert lines == [(LEDGER, written.data, (await cluster.manager.read(LEDGER)).data)]


@in_virtual_time
async def test_rule_s2_without_a_journal_nothing_is_written() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    def refuse(ledger_id: int, old: bytes, new: bytes) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        await repair(cluster, journal=refuse)

    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


@in_virtual_time
async def test_metadata_that_cannot_be_read_is_left_alone_and_said() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.store.set(cluster.manager.path(LEDGER), b"rubbish", version=-1)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.CORRUPT_METADATA)
    assert (await cluster.store.get(cluster.manager.path(LEDGER)))[0] == b"rubbish"
    await assert_still_marked(cluster)


@pytest.mark.parametrize("version", [1, 2, 3])
@in_virtual_time
async def test_metadata_keeps_its_version(version: int) -> None:
    cluster = await Cluster.start()
    fields = VERSION_1 if version == 1 else {"metadata_version": version}
    await cluster.write_ledger((B1, B2), **fields)
    await cluster.kill(B2)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    after = await cluster.manager.read(LEDGER)
    assert after.metadata.metadata_version == version
    assert parse_metadata(serialize_metadata(after.metadata)) == after.metadata
    await cluster.assert_whole()


# --- What is gone ---------------------------------------------------------------------------------


@in_virtual_time
async def test_a_deleted_ledger_is_unmarked() -> None:
    cluster = await Cluster.start()

    outcome = await repair(cluster)

    assert outcome == DONE
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_rule_s8_a_ledger_is_believed_gone_only_after_a_sync_and_a_second_read() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    await cluster.mark()
    async with cluster.node() as node:
        take = await node.take()
        await cluster.manager.delete(LEDGER, version=0)
        synced: list[str] = []
        sync = node.store.sync

        async def sync_and_find_it(path: str) -> None:
            synced.append(path)
            await sync(path)
            await cluster.write_ledger((B1, B2))  # only now has our server heard of it

        node.store.sync = sync_and_find_it  # type: ignore[method-assign]

        outcome = await node.repairer.repair(take)

    assert outcome == DONE
    assert synced == [cluster.manager.path(LEDGER)]
    assert cluster.bookies.asked(B1), "it was found, and so it was checked"


# --- What a bookie that is there lacks ------------------------------------------------------------


@in_virtual_time
async def test_rule_s15_a_live_bookie_gets_back_just_what_it_lacks() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2, B3))
    for entry_id in (0, 4):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 2)
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@in_virtual_time
async def test_rule_s15_what_was_written_in_place_is_read_back_before_the_mark_goes() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    for entry_id in (0, 4):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    await repair(cluster)

    assert cluster.bookies.transfers[-1][0].target is None
    written_at = max(i for i, (t, _) in enumerate(cluster.bookies.transfers) if t.target == B2)
    read_back = [
        entry_id
        for transfer, _ in cluster.bookies.transfers[written_at + 1 :]
        for entry_id in transfer.reads.get(B2, ())
    ]
    assert {0, 4} <= set(read_back)


@in_virtual_time
async def test_a_bookie_that_acknowledges_and_keeps_nothing_is_replaced() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).lose(LEDGER, 0)
    add = cluster.bookie(B2).add
    cluster.bookie(B2).add = lambda entry, **options: None  # type: ignore[method-assign]

    outcome = await repair(cluster)

    cluster.bookie(B2).add = add  # type: ignore[method-assign]
    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s7_a_damaged_copy_is_moved_and_never_copied_on() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).corrupt(LEDGER, 0)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


@in_virtual_time
async def test_two_copies_damaged_at_different_places_make_two_good_ones() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    cluster.bookie(B1).corrupt(LEDGER, 0)
    cluster.bookie(B2).corrupt(LEDGER, 9)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert not (await cluster.metadata()).bookies & {B1, B2}
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s15_without_another_bookie_damage_is_overwritten_and_read_back() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).corrupt(LEDGER, 4)
    cluster.bookie(B2).corrupt(LEDGER, 0)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.asked(B2).count(4) == 2, "before and after"
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s7_copies_that_all_fail_alike_put_our_key_in_doubt() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), **VERSION_1)
    await cluster.kill(B3)

    outcome = await repair(cluster, fallback=WRONG_DIGEST)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.DIGEST_SUSPECT)
    assert cluster.bookies.copied_count == 0
    await assert_still_marked(cluster)


@in_virtual_time
async def test_rule_s6_a_bookie_that_came_back_is_not_believed_whole_by_its_ends() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.wipe(B2)
    for entry_id in (0, 9):  # as if a client had read-repaired its ends
        cluster.put(LEDGER, entry_id, B2)
    await cluster.revive(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 5)
    await cluster.assert_whole()


@in_virtual_time
async def test_rule_s6_a_bookie_that_came_back_with_its_data_is_asked_for_its_ends_only() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.revive(B2)

    assert await repair(cluster) == DONE

    assert cluster.bookies.asked(B2) == [0, 9]


# --- What nobody says -----------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s5_and_s6_a_bookie_that_does_not_answer_keeps_the_ledger_marked() -> None:
    cluster = await Cluster.start()
    before = await cluster.write_ledger((B1, B2, B3))
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_ANSWER)
    assert B2 in outcome.detail
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


@in_virtual_time
async def test_what_is_known_is_repaired_though_another_bookie_does_not_answer() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), (B4, B5, B6), starts=(0, 10), last=19)
    await cluster.kill(B2)
    cluster.bookies.fail(B5, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_ANSWER)
    assert B2 not in (await cluster.metadata()).bookies
    await assert_still_marked(cluster)
    cluster.bookies.stop_failing(B5, Op.READ)
    await cluster.assert_whole()


@in_virtual_time
async def test_without_any_good_copy_the_ledger_waits_and_says_which_entries() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    await cluster.kill(B2)
    cluster.bookie(B1).lose(LEDGER, 4)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_COPY)
    assert outcome.detail == f"no good copy of entry 4 besides the one on {B2}"
    assert (await cluster.ensembles()) == [(B1, B2)]
    await assert_still_marked(cluster)


@in_virtual_time
async def test_rule_s15_an_entry_is_found_on_a_former_member() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), (B3, B2), starts=(0, 5), last=9)
    cluster.put(LEDGER, 4, B3)
    cluster.bookie(B1).lose(LEDGER, 4)
    await cluster.kill(B2)

    outcome = await repair(cluster)
    again = await repair(cluster)

    assert {outcome.kind, again.kind} == {OutcomeKind.DONE}
    assert B2 not in (await cluster.metadata()).bookies
    assert Answer.ABSENT in {
        answer
        for _, result in cluster.bookies.transfers
        for answers in result.failures.values()
        for answer in answers.values()
    }


# --- Targets --------------------------------------------------------------------------------------


@in_virtual_time
async def test_with_no_bookie_left_to_take_over_the_ledger_waits() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_TARGET)
    assert "add a bookie" in outcome.detail
    await assert_still_marked(cluster)


@pytest.mark.parametrize("local", [B4, B5, B6, B7])
@in_virtual_time
async def test_among_equals_the_local_bookie_is_the_target(local: BookieId) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    await repair(cluster, local=local)

    assert await cluster.ensembles() == [(B1, local, B3)]


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        pytest.param(B5, None, id="it can take over"),
        pytest.param(B1, Reason.NO_TARGET, id="it is a member already"),
        pytest.param(None, Reason.NO_TARGET, id="there is none"),
    ],
)
@in_virtual_time
async def test_target_local_leaves_no_other_choice(
    local: BookieId | None, reason: Reason | None
) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    outcome = await repair(cluster, local=local, settings=ReplicationSettings(target="local"))

    assert outcome.reason is reason
    assert cluster.bookies.targets == ([local] if reason is None else [])
