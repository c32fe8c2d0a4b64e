"""Inspecting ledgers on absent or reformatted bookies, and with clocks that disagree."""

from dataclasses import replace

import pytest

from auditor.fsck.executor import recheck_ledger
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.model import BookieId, LedgerState
from replication.copy_reader import CONFIRM_AFTER_S
from tests.fsck.inspections import (
    ALL,
    executor,
    inspect_once,
    inspect_twice,
    one_ledger,
    options,
    told,
)
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4


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
