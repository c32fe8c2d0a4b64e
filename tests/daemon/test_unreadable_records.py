"""Rubbish in bookmender's own records: it is told, stops nothing, and is written again."""

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from auditor.mark_reasons import LossRecords, MarkExplainer, read_private_queue
from auditor.records import AuditRecord, Identities, read_audit, read_identities
from daemon.cli import check as check_command
from daemon.cli import ledger as ledger_command
from daemon.cli import status as status_command
from daemon.status.gathering import gather_status
from daemon.status.unreadable import (
    UnreadableRecord,
    record_directories,
    single_records,
    unreadable_records,
)
from replication.orders import checks_znode
from replication.records import read_stored
from replication.znodes import Mark
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import delayed, with_ledgers
from tests.daemon.in_memory import InMemory
from tests.daemon.status_values import codes
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time, queue_empty, shut_out, until
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, working

RUBBISH = b"\x00rubbish"
SINGLE = [path for path, _, _ in single_records(PATHS)]
IN_DIRECTORIES = [f"{directory}/7" for directory, _, _ in record_directories(PATHS)]
ALL = [*SINGLE, *IN_DIRECTORIES]


async def spoil(cluster: Cluster, *paths: str) -> None:
    for path in paths:
        if await cluster.store.exists(path) is None:
            await cluster.store.create(path, RUBBISH, with_parents=True)
        else:
            await cluster.store.set(path, RUBBISH, version=-1)


async def unreadable(cluster: Cluster) -> list[str]:
    return [each.path for each in await unreadable_records(cluster.store, PATHS)]


def name_of(path: str) -> str:
    return path.partition("/bookmender/")[2]


# --- It is told -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_status_names_the_record_and_what_is_unknown(in_memory: InMemory, path: str) -> None:
    async def prepare(cluster: Cluster) -> None:
        await spoil(cluster, path)

    result, found = in_memory(
        status_command.status,
        "-o",
        "json",
        prepare=prepare,
        look=lambda cluster: unreadable_records(cluster.store, PATHS),
    )

    told = json.loads(result.stdout)
    (each,) = found
    assert isinstance(each, UnreadableRecord)
    assert each.path == path
    assert told["unreadable_records"] == [path]
    assert told["health"] in ("WARN", "ERROR")
    (condition,) = (c for c in told["conditions"] if c["code"] == "RECORD_UNREADABLE")
    assert condition["severity"] == "WARN"
    assert path in condition["fact"]
    assert each.unknown in condition["fact"]


@in_virtual_time
async def test_readable_and_absent_records_are_not_told() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster), cluster.node() as node, working(node):
        await asyncio.sleep(60)

        assert await unreadable(cluster) == []


@pytest.mark.parametrize(
    ("path", "check"),
    [
        (PATHS.last_audit, "bookies"),
        (PATHS.check("all-ledgers"), "all-ledgers"),
        (PATHS.check("idle-open"), "idle-open"),
    ],
)
@pytest.mark.parametrize("output", ["text", "json"])
def test_check_list_does_not_say_that_the_check_never_ran(
    in_memory: InMemory, path: str, check: str, output: str
) -> None:
    async def prepare(cluster: Cluster) -> None:
        await spoil(cluster, path)

    result, _ = in_memory(check_command.check, "-o", output, prepare=prepare)

    assert result.exit_code == 3
    if output == "json":
        rows = {row["check"]: row for row in json.loads(result.stdout)["checks"]}
        assert rows[check]["unreadable_records"] == [path]
        return
    assert f"{check}: last run unknown" in result.stdout
    assert f"({path})" in result.stdout


def test_check_list_with_an_unreadable_order_is_no_success(in_memory: InMemory) -> None:
    path = checks_znode(PATHS).path

    async def prepare(cluster: Cluster) -> None:
        await spoil(cluster, path)

    result, _ = in_memory(check_command.check, prepare=prepare)

    assert result.exit_code == 1
    assert f"({path})" in result.output


@pytest.mark.parametrize("path", [PATHS.idle, PATHS.check("idle-open")], ids=name_of)
def test_ledger_idle_does_not_say_that_there_is_none(in_memory: InMemory, path: str) -> None:
    async def prepare(cluster: Cluster) -> None:
        await spoil(cluster, path)

    result, _ = in_memory(ledger_command.idle, prepare=prepare)

    assert result.exit_code == 3
    assert path in result.stdout


@in_virtual_time
async def test_the_cause_of_a_mark_says_that_its_record_cannot_be_read() -> None:
    cluster = await with_ledgers((B1, B2))
    await spoil(cluster, PATHS.losses, PATHS.finding(7))
    explainer = await MarkExplainer.read(cluster.store, PATHS, [0, 7])

    (lost,) = explainer.explain(0, Mark(replicas=(B1,)), is_private=False)
    (found, _) = explainer.explain(7, Mark(replicas=(B1,)), is_private=True)

    assert (lost.cause, lost.detail) == ("unknown", "the record of lost bookies cannot be read")
    assert (found.cause, found.detail) == ("unknown", "the finding cannot be read")


@in_virtual_time
async def test_an_unreadable_finding_counts_as_damage_of_all_bookies_of_the_mark() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, B2)
    await spoil(cluster, PATHS.finding(LEDGER))
    async with cluster.node() as node:
        lease = await node.lease()

        assert await node.queue.found_bad(lease) == {B1, B2}
    await cluster.store.create(PATHS.private.mark(LEDGER), with_parents=True)
    private = await read_private_queue(cluster.store, PATHS, shared=())
    assert private.damaged == (LEDGER,)


@pytest.mark.parametrize("path", [PATHS.waiting_note(0), PATHS.given_up(0)], ids=name_of)
def test_ledger_show_names_an_unreadable_record_of_the_ledger(
    in_memory: InMemory, path: str
) -> None:
    async def prepare(cluster: Cluster) -> None:
        await cluster.write_ledger((B1, B2), ledger_id=0)
        await spoil(cluster, path)

    result, _ = in_memory(ledger_command.show, "0", prepare=prepare)

    assert result.exit_code == 0
    assert f"its record {path} cannot be read" in result.stdout


# --- It stops nothing, and is written again -------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=name_of)
@in_virtual_time
async def test_a_lost_bookie_is_repaired_all_the_same(path: str) -> None:
    cluster = await with_ledgers((B1, B2))
    await spoil(cluster, path)
    async with auditing(cluster, settings=delayed(10)), cluster.node() as node, working(node):
        await asyncio.sleep(5)
        await cluster.kill(B1)
        await asyncio.sleep(20)
        await until(cluster, lambda: queue_empty(cluster))

    metadata = await cluster.metadata(0)
    assert all(B1 not in segment.ensemble for segment in metadata.segments)


@pytest.mark.parametrize(
    "path", [PATHS.absences, PATHS.identities, PATHS.losses, PATHS.last_audit], ids=name_of
)
@in_virtual_time
async def test_a_new_leader_writes_the_record_again(path: str) -> None:
    cluster = await with_ledgers((B1, B2))
    await spoil(cluster, path)

    async with auditing(cluster):
        await asyncio.sleep(120)

    assert await unreadable(cluster) == []


@in_virtual_time
async def test_a_leader_that_knows_the_record_loses_nothing_of_it() -> None:
    cluster = await Cluster.start()
    audit = AuditRecord(finished_ms=5, ledger_count=1, mark_count=0, unreadable=(3,))
    identities = Identities(cookies={B1: 5})
    for path, record in ((PATHS.last_audit, audit), (PATHS.identities, identities)):
        await cluster.store.create(path, record.to_json(), with_parents=True)
    async with leading(cluster) as leader:
        await leader.records.remember_stored()
        await spoil(cluster, PATHS.last_audit, PATHS.identities)

        await leader.records.rewrite_unreadable()

    assert await read_audit(cluster.store, PATHS) == audit
    assert await read_identities(cluster.store, PATHS) == {B1: 5}


@in_virtual_time
async def test_unavailable_ledgers_become_unknown_and_are_told_again_within_a_minute() -> None:
    cluster = await with_ledgers((B1, B2))

    async def told() -> list[str]:
        return codes(await gather_status(visiting(cluster), clock=cluster.clock))

    async with auditing(cluster, settings=delayed(1_000)):
        await asyncio.sleep(30)
        for bookie in (B1, B2):
            await cluster.kill(bookie)
        await asyncio.sleep(30)
        before = await told()
        await spoil(cluster, PATHS.absences)
        spoiled = await told()
        await asyncio.sleep(70)
        after = await told()

    assert "LEDGERS_UNAVAILABLE ERROR" in before
    assert {"RECORD_UNREADABLE WARN", "AVAILABILITY_UNKNOWN UNKNOWN"} <= set(spoiled)
    assert after == before


@in_virtual_time
async def test_an_unreadable_record_is_not_an_absent_one() -> None:
    cluster, path = await Cluster.start(), PATHS.losses
    absent = await read_stored(cluster.store, path, LossRecords.parse)
    await spoil(cluster, path)
    spoiled = await read_stored(cluster.store, path, LossRecords.parse)

    assert (absent.value, absent.is_unreadable, absent.stat) == (None, False, None)
    assert (spoiled.value, spoiled.is_unreadable) == (None, True)
    assert spoiled.stat is not None


@in_virtual_time
async def test_denied_access_is_not_logged_at_each_reading() -> None:
    """Workers read some records many times a second."""
    cluster, path = await Cluster.start(), f"{PATHS.private.directory}/read_often"
    await spoil(cluster, path)
    async with cluster.node() as node:
        shut_out(node.store, path)
        with capture_logs() as logs:
            for _ in range(10):
                assert (await read_stored(node.store, path, LossRecords.parse)).is_unreadable

    assert [line["path"] for line in logs] == [path]
