"""Inspecting ledgers in memory: the expected entries, the bookies asked, and the recheck."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from auditor.fsck.executor import inspect_ledger, recheck_ledger
from auditor.fsck.ledger_inspector import LedgerInspector
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.errors import NoAnswerError, SessionLostError
from ledgers.manager import VersionedMetadata
from ledgers.model import FEED_MARKER, BookieId, LedgerState
from ledgers.placement import RackRule
from replication.copy_reader import CONFIRM_AFTER_S
from tests.fsck.inspections import (
    ALL,
    executor,
    inspect_many,
    inspect_once,
    inspect_twice,
    lose,
    one_ledger,
    options,
    replace_payload,
    told,
)
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER

METADATA, ENDS, SAMPLE, FULL = Level
WHOLE = (Grade.WHOLE, ())
at_each_level = pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
where_read = pytest.mark.parametrize("level", [ENDS, SAMPLE, FULL], ids=lambda level: level.value)


# --- Healthy ledgers ------------------------------------------------------------------------------


@at_each_level
@in_virtual_time
async def test_healthy_ledgers_are_whole(level: Level) -> None:
    cluster = await Cluster.start()
    shapes: list[dict[str, Any]] = [
        {"write_quorum": 1, "last": 7},
        {"write_quorum": 2, "last": 100},
        {"write_quorum": 3, "last": 0},
        {"write_quorum": 3, "last": -1},
        {"write_quorum": 2, "last": 20, "starts": (0, 5), "ensembles": 2},
        {"write_quorum": 3, "last": 20, "starts": (0, 21), "ensembles": 2},
    ]
    for ledger_id, shape in enumerate(shapes):
        ensembles = [(B1, B2, B3), (B1, B4, B3)][: shape.pop("ensembles", 1)]
        await cluster.write_ledger(*ensembles, ledger_id=ledger_id, **shape)

    found = await inspect_many(cluster, range(len(shapes)), level)

    assert {i: told(verdict) for i, verdict in found.items()} == dict.fromkeys(
        range(len(shapes)), WHOLE
    )
    assert not any(verdict.rests_on_unknown for verdict in found.values())
    assert all(verdict.state == "closed" for verdict in found.values())


@in_virtual_time
async def test_inspecting_writes_and_fences_nothing() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN)
    before = await cluster.manager.read(LEDGER)
    cluster.bookie(B1).lose(LEDGER, 3)

    await inspect_twice(cluster)

    assert (await cluster.manager.read(LEDGER)).stat == before.stat
    cluster.put(LEDGER, 10, *ALL)  # a fenced bookie would refuse


@in_virtual_time
async def test_copies_that_differ_only_in_lac_and_digest_are_good() -> None:
    """Java's repair writes entries with the LAC that it knows."""
    cluster, _ = await one_ledger()
    for entry_id in range(10):
        cluster.put(LEDGER, entry_id, B2, lac=9)

    assert told(await inspect_once(cluster)) == WHOLE


@in_virtual_time
async def test_each_level_reads_its_share_of_entries() -> None:
    cluster, _ = await one_ledger(last=99)

    counts = {level: (await inspect_once(cluster, level)).entries_read for level in Level}

    assert (counts[METADATA], counts[ENDS], counts[FULL]) == (0, 6, 300)
    assert 6 < counts[SAMPLE] <= 6 + 30 * 3
    assert len({tuple(cluster.bookies.asked(bookie)) for bookie in ALL}) == 1


# --- Open ledgers ---------------------------------------------------------------------------------


@where_read
@in_virtual_time
async def test_unacknowledged_entries_of_an_open_ledger_may_be_missing(level: Level) -> None:
    """The last entry's copies may be on their way; it says that the one before is acknowledged."""
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    cluster.put(LEDGER, 10, B1, lac=8)

    verdict = await inspect_once(cluster, level)

    assert told(verdict) == WHOLE
    assert (verdict.state, verdict.last_entry_id) == ("open", 8)


@in_virtual_time
async def test_a_late_copy_is_there_at_the_recheck() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    cluster.bookie(B3).lose(LEDGER, 8)

    first = await inspect_once(cluster)
    cluster.put(LEDGER, 8, B3)
    cluster.put(LEDGER, 10, B1, B2)  # and the next one is late
    cluster.put(LEDGER, 11, B1, B2)
    second = await recheck_ledger(await executor(cluster, options()), first)

    assert told(first) == (Grade.DEGRADED, (Finding.ACK_QUORUM_ONLY,))
    assert told(second) == WHOLE
    assert second is not None
    assert second.last_entry_id == 10


@in_virtual_time
async def test_an_open_ledger_below_its_ack_quorum_is_wrong() -> None:
    cluster, metadata = await one_ledger(state=LedgerState.OPEN, last=9)
    lose(cluster, metadata, 3, 2)

    verdict = await inspect_twice(cluster)

    assert told(verdict) == (Grade.AT_RISK, (Finding.MISSING,))


@where_read
@in_virtual_time
async def test_an_open_end_that_no_bookie_reports_is_unknown(level: Level) -> None:
    """The fragments before the open end are judged."""
    cluster, _ = await one_ledger(
        (B1, B2, B3), (B1, B4, B5), starts=(0, 5), last=9, state=LedgerState.OPEN
    )
    for bookie in (B4, B5):
        cluster.bookies.fail(bookie, Op.READ_LAC, Fault(error=NoAnswerError))

    verdict = await inspect_once(cluster, level)

    assert told(verdict) == (Grade.UNKNOWN, (Finding.NOT_ANSWERED,))
    assert [each.grade for each in verdict.fragments] == [Grade.WHOLE, Grade.UNKNOWN]
    assert verdict.rests_on_unknown


@in_virtual_time
async def test_an_open_end_first_reported_at_the_recheck_is_judged() -> None:
    cluster, metadata = await one_ledger(state=LedgerState.OPEN, last=9)
    lose(cluster, metadata, 3, 2)
    for bookie in ALL:
        cluster.bookies.fail(bookie, Op.READ_LAC, Fault(error=NoAnswerError))
    first = await inspect_once(cluster)
    for bookie in ALL:
        cluster.bookies.stop_failing(bookie, Op.READ_LAC)
    await asyncio.sleep(60)  # a quarantine is over

    second = await recheck_ledger(await executor(cluster, options()), first)

    assert told(first) == (Grade.UNKNOWN, (Finding.NOT_ANSWERED,))
    assert told(second) == (Grade.AT_RISK, (Finding.MISSING,))


IDLE: dict[str, Any] = {"idle_open_after_s": 3_600.0}


@in_virtual_time
async def test_an_open_ledger_without_new_entries_is_idle() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    await asyncio.sleep(3_600)

    verdict = await inspect_twice(cluster, ENDS, **IDLE)

    assert told(verdict) == (Grade.WHOLE, (Finding.IDLE_OPEN,))
    assert verdict is not None
    assert not verdict.is_wrong


@in_virtual_time
async def test_a_ledger_of_the_change_feed_is_not_idle() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9, custom=(FEED_MARKER,))
    await asyncio.sleep(3_600)

    assert told(await inspect_twice(cluster, ENDS, **IDLE)) == WHOLE


@in_virtual_time
async def test_an_open_ledger_with_new_entries_is_not_idle() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    assert told(await inspect_once(cluster, ENDS, **IDLE)) == WHOLE  # it is new
    await asyncio.sleep(3_600)

    first = await inspect_once(cluster, ENDS, **IDLE)
    for entry_id in (10, 11):
        cluster.put(LEDGER, entry_id, *ALL)
    second = await recheck_ledger(await executor(cluster, options(ENDS, **IDLE)), first)

    assert told(first) == (Grade.WHOLE, (Finding.IDLE_OPEN,))
    assert told(second) == WHOLE


# --- Entries after the last confirmed one ---------------------------------------------------------


async def with_tail(state: LedgerState, *holders: BookieId) -> Cluster:
    """Return a cluster with four entries on ``holders`` that no bookie knows to be acknowledged."""
    cluster, _ = await one_ledger(state=state, last=-1)
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, *holders, lac=-1)
    return cluster


@pytest.mark.parametrize("level", [ENDS, FULL], ids=lambda level: level.value)
@in_virtual_time
async def test_in_recovery_every_stored_entry_is_expected(level: Level) -> None:
    at_risk = await inspect_twice(await with_tail(LedgerState.IN_RECOVERY, B3), level)
    whole = await inspect_twice(await with_tail(LedgerState.IN_RECOVERY, *ALL), level)

    assert told(at_risk) == (Grade.AT_RISK, (Finding.MISSING,))
    assert at_risk is not None
    evidence = at_risk.evidence[0]
    assert (evidence.bookie, evidence.first_entry_id, evidence.last_entry_id) == (B1, 0, 3)
    assert told(whole) == WHOLE


@in_virtual_time
async def test_in_recovery_an_entry_that_all_deny_is_the_end() -> None:
    """The writer died while entry 4 was on its way, but entry 5 had been stored."""
    cluster = await with_tail(LedgerState.IN_RECOVERY, *ALL)
    cluster.put(LEDGER, 5, B3, lac=-1)
    nobody_wiped = await inspect_twice(cluster, FULL)
    await cluster.kill(B1)
    await cluster.wipe(B1)
    await cluster.revive(B1)
    one_wiped = await inspect_twice(cluster, FULL)

    assert told(nobody_wiped) == WHOLE
    assert told(one_wiped) == (Grade.LOST, (Finding.MISSING,)), "as far as can be known"


@in_virtual_time
async def test_every_entry_of_an_idle_reformatted_ledger_is_expected() -> None:
    cluster = await with_tail(LedgerState.OPEN, B3)
    await asyncio.sleep(3_600)
    before = await inspect_twice(cluster, ENDS, **IDLE)
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)
    after = await inspect_twice(cluster, ENDS, **IDLE)

    assert told(before) == (Grade.WHOLE, (Finding.IDLE_OPEN,))
    unproven_too = (Finding.MISSING, Finding.END_UNPROVEN, Finding.IDLE_OPEN)
    assert told(after) == (Grade.AT_RISK, unproven_too)


@in_virtual_time
async def test_an_open_ledger_needs_only_its_acknowledged_entries() -> None:
    assert told(await inspect_twice(await with_tail(LedgerState.OPEN, B3), ENDS)) == WHOLE


# --- Metadata -------------------------------------------------------------------------------------


@at_each_level
@pytest.mark.parametrize("data", [b"", b"BookieMetadataFormatVersion\t9\n", b"garbage"])
@in_virtual_time
async def test_damaged_metadata_is_a_finding(level: Level, data: bytes) -> None:
    cluster, _ = await one_ledger()
    await cluster.store.set(cluster.manager.path(LEDGER), data, version=0)

    verdict = await inspect_twice(cluster, level)

    assert told(verdict) == (Grade.UNKNOWN, (Finding.UNREADABLE_METADATA,))


@at_each_level
@in_virtual_time
async def test_denied_metadata_is_a_finding(level: Level) -> None:
    cluster, _ = await one_ledger()
    looking = await executor(cluster, options(level))
    shut_out(looking.manager._store, cluster.manager.path(LEDGER))

    first = await inspect_ledger(looking, LEDGER)
    assert first is not None
    second = await recheck_ledger(looking, first)

    assert told(first) == told(second) == (Grade.UNKNOWN, (Finding.UNREADABLE_METADATA,))
    assert [each.code for each in first.evidence] == ["unauthorized"]


@at_each_level
@in_virtual_time
async def test_a_misplaced_ensemble_is_a_finding_but_no_grade(level: Level) -> None:
    cluster, _ = await one_ledger()
    rule = RackRule(min_racks=2, is_enforced=False)
    in_one = dict.fromkeys(ALL, "/a")

    apart = await inspect_once(cluster, level, rule=rule, racks=in_one | {B3: "/b"})
    together = await inspect_once(cluster, level, rule=rule, racks=in_one)
    unknown = await inspect_once(cluster, level, rule=rule, racks={})

    assert (told(apart), told(unknown)) == (WHOLE, WHOLE)
    assert told(together) == (Grade.WHOLE, (Finding.MISPLACED,))
    assert not together.is_wrong


# --- Many ledgers ---------------------------------------------------------------------------------


@where_read
@in_virtual_time
async def test_a_bookie_without_an_end_is_asked_for_all_entries(level: Level) -> None:
    cluster, _ = await one_ledger(last=99)
    for entry_id in (0, 13, 50):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    verdict = await inspect_once(cluster, level)

    assert [(e.bookie, e.entry_count) for e in verdict.evidence] == [(B2, 3)]


@where_read
@in_virtual_time
async def test_a_ledger_of_many_ranges_is_inspected_completely(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.fsck.ledger_inspector.RANGE_COPIES", 100)
    last = 500
    cluster, _ = await one_ledger(write_quorum=2, last=last)
    for entry_id in (0, last):
        for bookie in ALL:
            if entry_id in cluster.bookie(bookie).entry_ids(LEDGER):
                cluster.bookie(bookie).lose(LEDGER, entry_id)

    verdict = await inspect_once(cluster, level)

    assert told(verdict) == (Grade.LOST, (Finding.MISSING,))
    assert all(sum(map(len, t.reads.values())) <= 100 for t, _ in cluster.bookies.transfers)
    assert sum(each.entry_count for each in verdict.evidence) == 4


@in_virtual_time
async def test_a_replaced_copy_is_reported_with_its_bookie() -> None:
    cluster, _ = await one_ledger(last=50)
    replace_payload(cluster, B3, 17)

    verdict = await inspect_twice(cluster)

    assert verdict is not None
    assert verdict.is_wrong
    assert [(e.finding, e.bookie, e.first_entry_id) for e in verdict.evidence] == [
        (Finding.SUSPECT, B3, 17)
    ]


@in_virtual_time
async def test_many_ledgers_are_inspected_concurrently() -> None:
    cluster = await Cluster.start()
    for ledger_id in range(100):
        await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
    for ledger_id in range(0, 100, 10):
        cluster.bookie(B1).lose(ledger_id, 4)

    found = await inspect_many(cluster, range(100))

    wrong = sorted(i for i, verdict in found.items() if verdict.is_wrong)
    assert (len(found), wrong) == (100, list(range(0, 100, 10)))


# --- Absent and reformatted bookies, and other clocks ---------------------------------------------


@in_virtual_time
async def test_a_recheck_does_not_wait_longer_for_a_clock_ahead() -> None:
    cluster, _ = await one_ledger()
    looking = await executor(cluster, options())
    first = await inspect_once(cluster)
    began_s = cluster.clock.now_s()

    await recheck_ledger(looking, replace(first, checked_ms=first.checked_ms + 3_600_000))

    assert cluster.clock.now_s() - began_s <= CONFIRM_AFTER_S + 1


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@pytest.mark.parametrize("away", [(B1,), ALL], ids=["one", "all"])
@in_virtual_time
async def test_level_metadata_cannot_judge_an_open_ledger_on_absent(
    state: LedgerState, away: tuple[BookieId, ...]
) -> None:
    cluster, _ = await one_ledger(state=state, last=9)
    await cluster.kill(*away)

    verdict = await inspect_twice(cluster, Level.METADATA)

    assert verdict is not None
    assert told(verdict) == (Grade.UNKNOWN, (Finding.BOOKIE_GONE,))
    assert {each.bookie for each in verdict.evidence} == set(away)
    assert verdict.rests_on_unknown


@in_virtual_time
async def test_a_reformatted_bookie_is_not_excused_by_a_replacement() -> None:
    cluster, _ = await one_ledger((B1, B2, B3), (B1, B2, B4), starts=(0, 5), last=9)
    await cluster.kill(B3)
    await cluster.wipe(B3)
    await cluster.revive(B3)

    verdict = await inspect_twice(cluster, Level.FULL)

    assert verdict is not None
    assert verdict.is_wrong
    assert told(verdict) == (Grade.DEGRADED, (Finding.MISSING,))


# --- Unexpected errors ----------------------------------------------------------------------------


async def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Cluster:
    """Return a cluster in which inspecting ``LEDGER`` fails; two other ledgers are whole."""
    cluster, _ = await one_ledger()
    for ledger_id in (1, 2):
        await cluster.write_ledger((B1, B2, B3), write_quorum=3, ledger_id=ledger_id)
    look = LedgerInspector.inspect

    async def looking(
        self: LedgerInspector, versioned: VersionedMetadata, since: LedgerVerdict | None = None
    ) -> LedgerVerdict:
        if versioned.ledger_id == LEDGER:
            raise error
        return await look(self, versioned, since)

    monkeypatch.setattr(LedgerInspector, "inspect", looking)
    return cluster


@in_virtual_time
async def test_a_ledger_whose_inspection_crashes_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await failing(monkeypatch, ZeroDivisionError("what?"))

    with capture_logs() as logs:
        found = await inspect_many(cluster, [1, LEDGER, 2])

    assert told(found[LEDGER]) == (Grade.UNKNOWN, (Finding.NOT_ANSWERED,))
    assert "ZeroDivisionError('what?')" in found[LEDGER].evidence[0].detail
    assert {found[1].grade, found[2].grade} == {Grade.WHOLE}
    assert [(each["event"], each["ledger_id"]) for each in logs] == [
        ("fsck_inspection.crashed", LEDGER)
    ]


@in_virtual_time
async def test_an_expected_error_ends_the_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await failing(monkeypatch, SessionLostError("the session is over"))

    with pytest.raises(SessionLostError):
        await inspect_many(cluster, [LEDGER])
