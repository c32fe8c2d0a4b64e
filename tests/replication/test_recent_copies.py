"""A repair records its copies before metadata names them."""

import asyncio
from collections.abc import Sequence

import pytest

from ledgers.errors import BookmenderError, CorruptionError, QuotaError, UnauthorizedError
from ledgers.model import BookieId
from ledgers.store import MultiFailed, Operation, OperationResult, SetData
from replication.recent_copies import CopiesToRead, RecentCopies, session_of
from tests.replication.cluster import Cluster, with_lost_b2
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import lost_b2, once_copied, repair, repair_with


async def recorded(cluster: Cluster) -> dict[int, frozenset[BookieId]]:
    """Return what all records together say."""
    path = PATHS.recent_copies
    if await cluster.store.exists(path) is None:
        return {}
    found: dict[int, frozenset[BookieId]] = {}
    for name in await cluster.store.children(path):
        data, _ = await cluster.store.get(f"{path}/{name}")
        for ledger_id, targets in RecentCopies.parse(data).targets.items():
            found[ledger_id] = found.get(ledger_id, frozenset()) | targets
    return found


async def test_a_new_target_is_recorded_before_metadata_names_it() -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    at_write: list[dict[int, frozenset[BookieId]]] = []
    async with cluster.node() as node:
        write_operation = node.manager.write_operation

        async def write(*args: object, **options: object) -> SetData:
            at_write.append(await recorded(cluster))
            return await write_operation(*args, **options)  # type: ignore[arg-type]

        node.manager.write_operation = write  # type: ignore[method-assign]

        await repair_with(node)

    assert at_write == [{LEDGER: frozenset({B4})}]


async def test_a_copy_in_place_is_not_recorded() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).lose(LEDGER, 0)
    await cluster.mark(B2)

    await repair(cluster)

    assert cluster.has_good_copy(B2, LEDGER, 0)
    assert await recorded(cluster) == {}


async def test_concurrent_repairs_share_records() -> None:
    cluster = await with_lost_b2(40, B1, B2, B3, B4)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(10)

    assert len(await recorded(cluster)) == 40
    assert len(await cluster.store.children(PATHS.recent_copies)) < 10


@pytest.mark.parametrize("error", [UnauthorizedError, QuotaError])
async def test_a_refused_record_stops_no_repair(error: type[BookmenderError]) -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    ended: list[CopiesToRead] = []
    async with cluster.node() as node:
        node.recorder.on_ended = ended.append
        multi = node.store.multi

        async def refuse(operations: Sequence[Operation]) -> list[OperationResult]:
            for index, operation in enumerate(operations):
                if operation.path.startswith(PATHS.recent_copies):
                    raise MultiFailed(index, error("no access"))
            return await multi(operations)

        node.store.multi = refuse  # type: ignore[method-assign]

        outcome = await repair_with(node)

    assert outcome.reason is None
    assert [each.record.path for each in ended] == [None]


async def test_a_failed_repair_hands_over_its_record_too() -> None:
    cluster = await lost_b2(B1, B2, B3, B4)
    ended: list[CopiesToRead] = []
    async with cluster.node() as node:
        node.recorder.on_ended = ended.append

        async def interrupt(transfer: object) -> None:
            raise RuntimeError("cut short")

        once_copied(cluster, interrupt)
        with pytest.raises(RuntimeError):
            await repair_with(node)
        await asyncio.sleep(1)

    assert [(each.ledger_id, each.targets) for each in ended] == [(LEDGER, frozenset({B4}))]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"version": 2}', id="another version's fields"),
        pytest.param(b'{"version": 1, "ledgers_by_target": {}}', id="no ledger"),
        pytest.param(b'{"version": 1, "ledgers_by_target": {"b": [-1]}}', id="no ledger id"),
    ],
)
def test_data_that_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        RecentCopies.parse(data)


def test_a_record_survives_a_round_trip() -> None:
    copies = RecentCopies.of({7: [B1, B2], 8: [B2]})

    assert RecentCopies.parse(copies.to_json()).targets == {7: {B1, B2}, 8: {B2}}


def test_a_records_name_begins_with_its_session() -> None:
    assert session_of("0f3a-uuid.12") == "0f3a-uuid"
