"""Each kind of damage at each level: found, or documented as not visible at that level."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.errors import BookmenderError, NoAnswerError, UnreadableError
from ledgers.model import BookieId
from tests.fsck.inspections import inspect_twice, replace_payload, told
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER

Do = Callable[[Cluster], Awaitable[None]]
METADATA, ENDS, SAMPLE, FULL = Level
WHOLE = (Grade.WHOLE, ())
LAST = 29
MIDDLE = 14
"""An entry that is neither at an end nor in the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A kind of damage. ``seen_from``: the least close level that finds it."""

    name: str
    do: Do
    seen_from: Level
    grade: Grade
    findings: tuple[Finding, ...]
    rests_on_unknown: bool = False


def at(*entry_ids: int, bookies: tuple[BookieId, ...] = (B1,), how: str = "lose") -> Do:
    async def do(cluster: Cluster) -> None:
        for bookie in bookies:
            for entry_id in entry_ids:
                getattr(cluster.bookie(bookie), how)(LEDGER, entry_id)

    return do


def emptied(*bookies: BookieId) -> Do:
    async def do(cluster: Cluster) -> None:
        for bookie in bookies:
            cluster.bookie(bookie).wipe()

    return do


def failing(*bookies: BookieId, error: type[BookmenderError]) -> Do:
    async def do(cluster: Cluster) -> None:
        for bookie in bookies:
            cluster.bookies.fail(bookie, Op.READ, Fault(error=error))

    return do


def absent(*bookies: BookieId) -> Do:
    async def do(cluster: Cluster) -> None:
        await cluster.kill(*bookies)

    return do


async def replaced(cluster: Cluster) -> None:
    replace_payload(cluster, B2, MIDDLE)


async def replaced_length(cluster: Cluster) -> None:
    replace_payload(cluster, B2, MIDDLE, payload=b"x", length=1)


ALL = (B1, B2, B3)
DAMAGES = [
    Damage(
        name="an end missing on one",
        do=at(0),
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
    ),
    Damage(
        name="a middle entry missing on one",
        do=at(MIDDLE),
        seen_from=FULL,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
    ),
    Damage(
        name="one copy of the ledger deleted",
        do=emptied(B1),
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.MISSING,),
    ),
    Damage(
        name="two copies of the ledger deleted",
        do=emptied(B1, B2),
        seen_from=ENDS,
        grade=Grade.AT_RISK,
        findings=(Finding.MISSING,),
    ),
    Damage(
        name="all copies of the ledger deleted",
        do=emptied(*ALL),
        seen_from=ENDS,
        grade=Grade.LOST,
        findings=(Finding.MISSING,),
    ),
    Damage(
        name="an end flipped on one",
        do=at(LAST, how="corrupt"),
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.BAD_DIGEST,),
    ),
    Damage(
        name="a middle entry flipped on all",
        do=at(MIDDLE, bookies=ALL, how="corrupt"),
        seen_from=FULL,
        grade=Grade.LOST,
        findings=(Finding.BAD_DIGEST,),
    ),
    Damage(
        name="read errors on one",
        do=failing(B1, error=UnreadableError),
        seen_from=ENDS,
        grade=Grade.DEGRADED,
        findings=(Finding.READ_ERROR,),
    ),
    Damage(
        name="read errors on all",
        do=failing(*ALL, error=UnreadableError),
        seen_from=ENDS,
        grade=Grade.LOST,
        findings=(Finding.READ_ERROR,),
    ),
    Damage(
        name="one that hangs",
        do=failing(B1, error=NoAnswerError),
        seen_from=ENDS,
        grade=Grade.UNKNOWN,
        findings=(Finding.NOT_ANSWERED,),
        rests_on_unknown=True,
    ),
    Damage(
        name="all hang",
        do=failing(*ALL, error=NoAnswerError),
        seen_from=ENDS,
        grade=Grade.UNKNOWN,
        findings=(Finding.NOT_ANSWERED,),
        rests_on_unknown=True,
    ),
    Damage(
        name="one is not registered",
        do=absent(B1),
        seen_from=METADATA,
        grade=Grade.DEGRADED,
        findings=(Finding.BOOKIE_GONE,),
        rests_on_unknown=True,
    ),
    Damage(
        name="two are not registered",
        do=absent(B1, B2),
        seen_from=METADATA,
        grade=Grade.AT_RISK,
        findings=(Finding.BOOKIE_GONE,),
        rests_on_unknown=True,
    ),
    Damage(
        name="none is registered",
        do=absent(*ALL),
        seen_from=METADATA,
        grade=Grade.UNKNOWN,
        findings=(Finding.BOOKIE_GONE,),
        rests_on_unknown=True,
    ),
    Damage(
        name="another payload with a right digest",
        do=replaced,
        seen_from=FULL,
        grade=Grade.WHOLE,
        findings=(Finding.SUSPECT,),
    ),
    Damage(
        name="another length with a right digest",
        do=replaced_length,
        seen_from=FULL,
        grade=Grade.WHOLE,
        findings=(Finding.SUSPECT,),
    ),
]


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
@in_virtual_time
async def test_damage_is_found_from_its_level_on(damage: Damage, level: Level) -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger(ALL, last=LAST, write_quorum=3, ack_quorum=2)
    await damage.do(cluster)

    verdict = await inspect_twice(cluster, level)

    if level.depth < damage.seen_from.depth:
        assert told(verdict) == WHOLE
        return
    assert told(verdict) == (damage.grade, damage.findings)
    assert verdict is not None
    assert verdict.rests_on_unknown == damage.rests_on_unknown
