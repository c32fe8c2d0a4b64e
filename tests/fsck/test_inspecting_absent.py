"""Looks at ledgers in memory whose bookies are gone, or came back empty; and at clocks that do not
agree."""

from dataclasses import replace

import pytest

from auditor.checks.copies import SECOND_LOOK_S
from auditor.fsck.executor import recheck_ledger
from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.model import BookieId, LedgerState
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
async def test_a_second_look_waits_no_longer_where_a_clock_was_ahead() -> None:
    cluster, _ = await one_ledger()
    looking = await executor(cluster, options())
    first = await inspect_once(cluster)
    began_s = cluster.clock.now_s()

    await recheck_ledger(looking, replace(first, checked_ms=first.checked_ms + 3_600_000))

    assert cluster.clock.now_s() - began_s <= SECOND_LOOK_S + 1


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@pytest.mark.parametrize("away", [(B1,), ALL], ids=["one", "all"])
@in_virtual_time
async def test_metadata_alone_does_not_tell_what_an_open_ledger_has_on_bookies_that_are_gone(
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
async def test_who_was_wiped_of_a_first_ensemble_is_not_excused_by_a_later_change_of_it() -> None:
    cluster, _ = await one_ledger((B1, B2, B3), (B1, B2, B4), starts=(0, 5), last=9)
    await cluster.kill(B3)
    await cluster.wipe(B3)
    await cluster.revive(B3)

    verdict = await inspect_twice(cluster, Level.FULL)

    assert verdict is not None
    assert verdict.is_wrong
    assert told(verdict) == (Grade.DEGRADED, (Finding.MISSING,))
