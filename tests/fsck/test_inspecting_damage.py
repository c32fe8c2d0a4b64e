"""Each kind of damage at each level: found, or documented as not visible at that level."""

from collections.abc import Awaitable, Callable

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
    # The damage, the least close level that finds it, and the verdict from there on.
    pytest.param(at(0), ENDS, Grade.DEGRADED, Finding.MISSING, id="an end missing on one"),
    pytest.param(
        at(MIDDLE), FULL, Grade.DEGRADED, Finding.MISSING, id="a middle entry missing on one"
    ),
    pytest.param(
        emptied(B1), ENDS, Grade.DEGRADED, Finding.MISSING, id="one copy of the ledger deleted"
    ),
    pytest.param(
        emptied(B1, B2), ENDS, Grade.AT_RISK, Finding.MISSING, id="two copies of the ledger deleted"
    ),
    pytest.param(
        emptied(*ALL), ENDS, Grade.LOST, Finding.MISSING, id="all copies of the ledger deleted"
    ),
    pytest.param(
        at(LAST, how="corrupt"),
        ENDS,
        Grade.DEGRADED,
        Finding.BAD_DIGEST,
        id="an end flipped on one",
    ),
    pytest.param(
        at(MIDDLE, bookies=ALL, how="corrupt"),
        FULL,
        Grade.LOST,
        Finding.BAD_DIGEST,
        id="a middle entry flipped on all",
    ),
    pytest.param(
        failing(B1, error=UnreadableError),
        ENDS,
        Grade.DEGRADED,
        Finding.READ_ERROR,
        id="read errors on one",
    ),
    pytest.param(
        failing(*ALL, error=UnreadableError),
        ENDS,
        Grade.LOST,
        Finding.READ_ERROR,
        id="read errors on all",
    ),
    pytest.param(
        failing(B1, error=NoAnswerError),
        ENDS,
        Grade.UNKNOWN,
        Finding.NOT_ANSWERED,
        id="one that hangs",
    ),
    pytest.param(
        failing(*ALL, error=NoAnswerError), ENDS, Grade.UNKNOWN, Finding.NOT_ANSWERED, id="all hang"
    ),
    pytest.param(
        absent(B1), METADATA, Grade.DEGRADED, Finding.BOOKIE_GONE, id="one is not registered"
    ),
    pytest.param(
        absent(B1, B2), METADATA, Grade.AT_RISK, Finding.BOOKIE_GONE, id="two are not registered"
    ),
    pytest.param(
        absent(*ALL), METADATA, Grade.UNKNOWN, Finding.BOOKIE_GONE, id="none is registered"
    ),
    pytest.param(
        replaced, FULL, Grade.WHOLE, Finding.SUSPECT, id="another payload with a right digest"
    ),
    pytest.param(
        replaced_length, FULL, Grade.WHOLE, Finding.SUSPECT, id="another length with a right digest"
    ),
]


@pytest.mark.parametrize("level", Level, ids=lambda level: level.value)
@pytest.mark.parametrize(("do", "seen_from", "grade", "finding"), DAMAGES)
@in_virtual_time
async def test_damage_is_found_from_its_level_on(
    do: Do, seen_from: Level, grade: Grade, finding: Finding, level: Level
) -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger(ALL, last=LAST, write_quorum=3, ack_quorum=2)
    await do(cluster)

    verdict = await inspect_twice(cluster, level)

    if level.depth < seen_from.depth:
        assert told(verdict) == WHOLE
        return
    assert told(verdict) == (grade, (finding,))
    assert verdict is not None
    assert verdict.rests_on_unknown == (finding in (Finding.NOT_ANSWERED, Finding.BOOKIE_GONE))
