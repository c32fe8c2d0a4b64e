"""Reformatted bookies, and what they stored of ledgers that are not closed.

All entries are sent before the first acknowledgement arrives, so no entry carries a LAC. Only a
bookie that stores an entry knows of it. Each test has its own ledger and deletes it, because a
later test wipes other bookies.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from ledgers.errors import NoSuchEntryError
from ledgers.model import BookieId, LedgerMetadata, LedgerState
from ledgers.reading import find_end, ledger_digest
from ledgers.writing import LedgerOptions
from replication import znodes
from replication.ledger_record import WaitingNotes
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender, has_condition
from tests.cluster.our_client import our_client, sha256_of
from tests.cluster.steps import STOP_TIMEOUT_S, Bench, bench, errors, events, nodes, wait_for
from tests.fsck.running import options, run, told
from tests.java.messages import Verdict
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 3}  # just the ensemble, so no bookie can replace another

LAST = 29
PAYLOADS = [b"entry %d" % entry_id * 20 for entry_id in range(LAST + 1)]
SOON = {
    "REPLICATION_RETRY_MIN_S": "0.2",
    "REPLICATION_RETRY_MAX_S": "0.4",
    "REPLICATION_OPEN_LEDGER_GRACE_S": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclosed:
    """A ledger without a writer, on all three bookies. ``two`` will be wiped, the third never."""

    cluster: LocalCluster
    on: Bench
    ledger_id: int
    two: tuple[BookieId, BookieId]

    async def metadata(self) -> LedgerMetadata:
        return (await self.on.seen.manager.read(self.ledger_id)).metadata

    async def is_closed(self) -> bool:
        return (await self.metadata()).is_closed

    async def lose(self, *bookies: BookieId) -> None:
        """Kill the bookies, end their sessions and delete their data."""
        for bookie in bookies:
            await asyncio.to_thread(kill_and_expire, self.cluster, bookie)
            await asyncio.to_thread(self.cluster.wipe, bookie)

    async def bring_back(self, bookie: BookieId) -> None:
        """Start the bookie, which is empty."""
        await asyncio.to_thread(self.cluster.start_bookie, bookie)

    async def is_marked_for(self, bookie: BookieId) -> bool:
        path = self.on.seen.paths.mark(self.ledger_id)
        if not await self.on.seen.store.exists(path):
            return False
        data, _ = await self.on.seen.store.get(path)
        return bookie in znodes.parse_mark(data).replicas

    async def wait_unmarked(self) -> None:
        """Return at the first moment at which the queue is empty."""
        await wait_for(lambda: self.on.has_marked([]), "empty queue")

    async def has_all_copies(self) -> bool:
        return not await self.lacking()

    async def lacking(self) -> dict[BookieId, list[int]]:
        """Return the entries that each member lacks, read with a new client."""
        async with our_client(self.on.seen.settings.metadata_service_uri) as client:
            metadata = (await client.manager.read(self.ledger_id)).metadata
            digest, found = ledger_digest(metadata), {}
            for bookie in metadata.last_segment.ensemble:
                found[bookie] = list[int]()
                for entry_id, payload in enumerate(PAYLOADS):
                    try:
                        entry = await client.bookies.read(bookie, self.ledger_id, entry_id)
                    except NoSuchEntryError:
                        found[bookie].append(entry_id)
                        continue
                    digest.check(entry, ledger_id=self.ledger_id, entry_id=entry_id)
                    assert digest.payload(entry) == payload
        return {bookie: entry_ids for bookie, entry_ids in found.items() if entry_ids}


@asynccontextmanager
async def unclosed(cluster: LocalCluster, *, state: LedgerState) -> AsyncIterator[Unclosed]:
    """Yield an unclosed ledger. At the end, wait for an empty queue and delete it."""
    async with bench(cluster.metadata_service_uri) as on:
        ledger = await write_unclosed(cluster, on, state)
        try:
            yield ledger
            await on.wait_idle()
        finally:
            await on.seen.manager.delete(ledger.ledger_id, version=-1)


async def write_unclosed(cluster: LocalCluster, on: Bench, state: LedgerState) -> Unclosed:
    manager = on.seen.manager
    async with our_client(cluster.metadata_service_uri) as client:
        wide = LedgerOptions(ensemble_size=3, write_quorum=3, ack_quorum=2)
        async with client.create(wide) as writer:
            for sent in [await writer.send(payload) for payload in PAYLOADS]:
                await sent
            versioned = await manager.read(writer.ledger_id)
            first, second, _ = versioned.metadata.last_segment.ensemble
            ledger = Unclosed(
                cluster=cluster, on=on, ledger_id=writer.ledger_id, two=(first, second)
            )
            await wait_for(
                ledger.has_all_copies, "third copies, which the writer does not wait for"
            )
        opened = await find_end(versioned, bookies=client.bookies, clock=client.clock)
        assert opened.lac < LAST, "some entries should be after the last confirmed one"
    await manager.write(writer.ledger_id, versioned.metadata.with_state(state), read_as=versioned)
    return ledger


async def start_leader(start: Callable[..., Child]) -> Child:
    node = start("node", settings=SOON)
    await wait_for(lambda: events(node, "election.won"), "leader")
    return node


# --- An unfinished recovery -----------------------------------------------------------------------


async def test_two_reformatted_bookies_get_their_entries_back(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """Both are absent before either returns, so the end of the ledger cannot be proven."""

    async with (
        unclosed(module_cluster, state=LedgerState.IN_RECOVERY) as ledger,
        nodes(uri, tmp_path) as start,
    ):
        node = await start_leader(start)
        await ledger.lose(*ledger.two)
        await wait_for(lambda: ledger.on.has_marked([ledger.ledger_id]), "mark")

        for bookie in ledger.two:
            assert await ledger.on.has_marked([ledger.ledger_id]), (
                "called whole with missing copies"
            )
            await ledger.bring_back(bookie)
        await ledger.wait_unmarked()

        assert await ledger.lacking() == {}
        assert (await ledger.metadata()).state is LedgerState.IN_RECOVERY
        assert "0 to 29 remain" in failures(node)[-1]
        assert not errors(node)
        await assert_operators_learn_of(ledger, uri)


async def assert_operators_learn_of(ledger: Unclosed, uri: str) -> None:
    """Assert that status names the ledger, which has all copies but no provable end."""
    status: dict[str, Any] = {}

    # New ledgers that name them are watched for two session timeouts.
    async def is_settled() -> bool:
        nonlocal status
        status = (await bookmender(uri, "status", "-o", "json")).record
        return not has_condition(status, "BOOKIES_REFORMATTED", "WARN")

    await wait_for(is_settled, "end of the checks of reformatted bookies")
    assert has_condition(status, "LEDGER_END_UNPROVEN", "ERROR")
    assert status["unproven_ends"] == {"count": 1, "ledgers": [ledger.ledger_id]}
    shown = await bookmender(uri, "ledger", "show", str(ledger.ledger_id))
    assert f"bookmender ledger close {ledger.ledger_id} --accept-loss" in shown.out
    for bookie in ledger.two:
        assert f"{bookie} (reformatted)" in shown.out


def failures(node: Child) -> list[str]:
    deferral_reasons = events(node, "ledger.deferred")
    return [
        "; ".join(e["facts"]["errors"])
        for e in deferral_reasons
        if e["reason"] == Reason.END_UNPROVEN.value
    ]


@pytest.mark.long(group="repair")
async def test_two_bookies_reformatted_in_turn_cost_no_entry(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """By then, the copies of the first one may or may not have been repaired."""

    async with (
        unclosed(module_cluster, state=LedgerState.IN_RECOVERY) as ledger,
        nodes(uri, tmp_path) as start,
    ):
        node = await start_leader(start)

        for bookie in ledger.two:
            await ledger.lose(bookie)
            await wait_for(partial(ledger.is_marked_for, bookie), "mark")
            await ledger.bring_back(bookie)
        await ledger.wait_unmarked()

        assert await ledger.lacking() == {}
        if await ledger.is_closed():
            await assert_reads_whole(java, uri, ledger)
        assert not errors(node)


@pytest.mark.long(group="repair")
async def test_with_one_reformatted_bookie_a_recovery_is_finished(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """The bookie returns before the daemon starts, so the daemon has not seen its absence."""

    async with (
        unclosed(module_cluster, state=LedgerState.IN_RECOVERY) as ledger,
        nodes(uri, tmp_path) as start,
    ):
        await ledger.lose(ledger.two[0])
        await ledger.bring_back(ledger.two[0])
        node = start("node", settings=SOON)
        await wait_for(ledger.is_closed, "end of the recovery")
        await ledger.wait_unmarked()

        assert await ledger.lacking() == {}
        assert not failures(node)
        await assert_reads_whole(java, uri, ledger)
        assert not errors(node)


async def assert_reads_whole(java: JavaTool, uri: str, ledger: Unclosed) -> None:
    metadata = await ledger.metadata()
    assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, LAST)
    report = await asyncio.to_thread(java.judge, uri, [ledger.ledger_id])
    assert report.ledgers[ledger.ledger_id].verdict is Verdict.WHOLE
    read = await asyncio.to_thread(java.read, uri, ledger.ledger_id)
    assert (read.error, read.last, read.sha256) == (None, LAST, sha256_of(PAYLOADS))


@pytest.mark.long(group="repair")
async def test_fsck_finds_missing_copies_of_an_unfinished_recovery(
    module_cluster: LocalCluster, uri: str
) -> None:
    async with (
        unclosed(module_cluster, state=LedgerState.IN_RECOVERY) as ledger,
    ):
        await ledger.lose(*ledger.two)
        for bookie in ledger.two:
            await ledger.bring_back(bookie)

        for level in (Level.ENDS, Level.FULL):
            verdicts = await run(options(uri, level), [ledger.ledger_id])

            found = told(verdicts[ledger.ledger_id])
            assert found.grade is Grade.AT_RISK, level
            assert found.findings == (Finding.MISSING, Finding.END_UNPROVEN), level


# --- An open ledger without a writer --------------------------------------------------------------


@pytest.mark.long(group="repair")
async def test_an_open_ledger_keeps_its_mark_or_its_entries(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """With one reformatted bookie, the ledger stays marked; with two, its entries are kept."""

    async with (
        unclosed(module_cluster, state=LedgerState.OPEN) as ledger,
        nodes(uri, tmp_path) as start,
    ):
        first, second = ledger.two
        await ledger.lose(first)
        await ledger.bring_back(first)
        keeping = start("keeping", settings=SOON)
        await wait_for(lambda: tries(keeping) >= 3, "tries")
        note = await WaitingNotes(ledger.on.seen.store, ledger.on.seen.paths).read(ledger.ledger_id)
        assert note is not None
        assert note.reason is Reason.OPEN_FRAGMENT
        assert await ledger.on.has_marked([ledger.ledger_id])
        assert (await ledger.metadata()).state is LedgerState.OPEN
        assert await ledger.lacking() == {first: list(range(LAST + 1))}
        await asyncio.to_thread(stop_all, [keeping], timeout_s=STOP_TIMEOUT_S)

        await ledger.lose(second)
        await ledger.bring_back(second)
        saving = start("saving", settings=SOON)
        await ledger.wait_unmarked()

        assert await ledger.lacking() == {}
        assert deferral_reasons(saving) == [Reason.OPEN_LEDGER_GRACE, Reason.END_UNPROVEN]
        assert not errors(keeping) + errors(saving)


def deferral_reasons(node: Child) -> list[Reason]:
    """Return the reasons of all deferrals, in order."""
    return [Reason(event["reason"]) for event in events(node, "ledger.deferred")]


def tries(node: Child) -> int:
    return len(events(node, "ledger.retry_scheduled"))
