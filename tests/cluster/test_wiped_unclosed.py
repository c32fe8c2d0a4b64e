"""Bookies that come back empty, and what they held of ledgers that are not closed.

Every entry was acknowledged before the first of them told of any, so that nobody but who has an
entry knows of it. Each test has a ledger of its own, and deletes it: a later one wipes other
bookies.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from auditor.fsck.levels import Level
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
from tests.cluster.bookies_in_trouble import SESSION_TIMEOUT_S, kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.our_client import our_client, sha256_of
from tests.cluster.steps import STOP_TIMEOUT_S, Bench, bench, errors, events, nodes, wait_for
from tests.fsck.running import options, run, told
from tests.java.messages import Verdict
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

LAST = 29
PAYLOADS = [b"entry %d" % entry_id * 20 for entry_id in range(LAST + 1)]
SOON = {
    "REPLICATION_RETRY_MIN_S": "0.2",
    "REPLICATION_RETRY_MAX_S": "0.4",
    "REPLICATION_OPEN_LEDGER_GRACE_S": "1",
}


@pytest.fixture(scope="module")
def cluster_options() -> dict[str, Any]:
    """Just the ensemble: no bookie can take another's place."""
    return {"bookies": 3, "session_timeout_s": SESSION_TIMEOUT_S}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclosed:
    """A ledger without a writer, on all three bookies. ``two`` are to be wiped, and the third
    never."""

    cluster: LocalCluster
    on: Bench
    ledger_id: int
    two: tuple[BookieId, BookieId]

    async def metadata(self) -> LedgerMetadata:
        return (await self.on.seen.manager.read(self.ledger_id)).metadata

    async def is_closed(self) -> bool:
        return (await self.metadata()).is_closed

    async def lose(self, *bookies: BookieId) -> None:
        """All that they have, and they are away."""
        for bookie in bookies:
            await asyncio.to_thread(kill_and_expire, self.cluster, bookie)
            await asyncio.to_thread(self.cluster.wipe, bookie)

    async def bring_back(self, bookie: BookieId) -> None:
        """As an empty one."""
        await asyncio.to_thread(self.cluster.start_bookie, bookie)

    async def is_marked_for(self, bookie: BookieId) -> bool:
        path = self.on.seen.paths.mark(self.ledger_id)
        if not await self.on.seen.store.exists(path):
            return False
        data, _ = await self.on.seen.store.get(path)
        return bookie in znodes.parse_mark(data).replicas

    async def wait_unmarked(self) -> None:
        """The first moment at which the queue is empty."""
        await wait_for(lambda: self.on.has_marked([]), "empty queue")

    async def has_all_copies(self) -> bool:
        return not await self.lacking()

    async def lacking(self) -> dict[BookieId, list[int]]:
        """Entries that a member does not give, by a client that knows nothing of what has been."""
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
    """At the end the queue is empty, and the ledger is deleted."""
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
            await wait_for(ledger.has_all_copies, "the third copies, which no writer waits for")
        opened = await find_end(versioned, bookies=client.bookies, clock=client.clock)
        assert opened.lac < LAST, "something is to lie beyond what is known to be acknowledged"
    await manager.write(writer.ledger_id, versioned.metadata.with_state(state), read_as=versioned)
    return ledger


async def start_leader(start: Callable[..., Child]) -> Child:
    node = start("node", settings=SOON)
    await wait_for(lambda: events(node, "election.won"), "leader")
    return node


# --- A recovery that was begun, and never ended -----------------------------------------------------


def test_two_wiped_bookies_have_the_entries_of_a_recovery_that_never_ended_again(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """Both are away before either is back: nobody can prove any more where the ledger ended."""

    async def scenario() -> None:
        async with (
            unclosed(module_cluster, state=LedgerState.IN_RECOVERY) as ledger,
            nodes(uri, tmp_path) as start,
        ):
            node = await start_leader(start)
            await ledger.lose(*ledger.two)
            await wait_for(lambda: ledger.on.has_marked([ledger.ledger_id]), "mark")

            for bookie in ledger.two:
                assert await ledger.on.has_marked([ledger.ledger_id]), (
                    "said whole with copies missing"
                )
                await ledger.bring_back(bookie)
            await ledger.wait_unmarked()

            assert await ledger.lacking() == {}
            assert (await ledger.metadata()).state is LedgerState.IN_RECOVERY
            assert "0 to 29 are left" in failures(node)[-1]
            assert not errors(node)
            await assert_operators_learn_of(ledger, uri)

    asyncio.run(scenario())


async def assert_operators_learn_of(ledger: Unclosed, uri: str) -> None:
    """Whole, and unmarked: where it ends is for them to say."""
    status: dict[str, Any] = {}

    async def is_settled() -> bool:  # what comes to name them is watched for two session time-outs
        nonlocal status
        status = (await bookmender(uri, "status", "-o", "json")).record
        return bool(status["verdict"] != "bookies-wiped")

    await wait_for(is_settled, "end of the look at those set up anew")
    assert status["verdict"] == "ends-unproven"
    assert status["unproven_ends"] == {"count": 1, "ledgers": [ledger.ledger_id]}
    shown = await bookmender(uri, "ledger", "show", str(ledger.ledger_id))
    assert f"bookmender ledger close {ledger.ledger_id} --accept-loss" in shown.out
    for bookie in ledger.two:
        assert f"{bookie} (set up later)" in shown.out


def failures(node: Child) -> list[str]:
    defer = events(node, "ledger.put_aside")
    return [e["detail"] for e in defer if e["reason"] == Reason.END_UNPROVEN.value]


def test_a_bookie_that_is_wiped_as_the_one_before_comes_back_costs_no_entry(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Whether what the first lost was copied by then is left to chance."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_with_one_bookie_wiped_a_recovery_that_never_ended_is_ended_at_the_last_entry(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """It comes back before there is a daemon, who has not seen it go."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


async def assert_reads_whole(java: JavaTool, uri: str, ledger: Unclosed) -> None:
    metadata = await ledger.metadata()
    assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, LAST)
    report = await asyncio.to_thread(java.judge, uri, [ledger.ledger_id])
    assert report.ledgers[ledger.ledger_id].verdict is Verdict.WHOLE
    read = await asyncio.to_thread(java.read, uri, ledger.ledger_id)
    assert (read.error, read.last, read.sha256) == (None, LAST, sha256_of(PAYLOADS))


def test_fsck_misses_what_wiped_bookies_had_beyond_the_last_entry_known_to_be_acknowledged(
    module_cluster: LocalCluster, uri: str
) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


# --- An open ledger, whose writer is gone -------------------------------------------------------------


def test_an_open_ledger_keeps_its_mark_with_one_bookie_wiped_and_its_entries_with_two(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            unclosed(module_cluster, state=LedgerState.OPEN) as ledger,
            nodes(uri, tmp_path) as start,
        ):
            first, second = ledger.two
            await ledger.lose(first)
            await ledger.bring_back(first)
            keeping = start("keeping", settings=SOON)
            await wait_for(lambda: tries(keeping) >= 3, "tries")
            note = await WaitingNotes(ledger.on.seen.store, ledger.on.seen.paths).read(
                ledger.ledger_id
            )
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
            assert defer(saving) == [Reason.OPEN_LEDGER_GRACE, Reason.END_UNPROVEN]
            assert not errors(keeping) + errors(saving)

    asyncio.run(scenario())


def defer(node: Child) -> list[Reason]:
    """Why, each time that this changed."""
    return [Reason(event["reason"]) for event in events(node, "ledger.put_aside")]


def tries(node: Child) -> int:
    return len(events(node, "ledger.deferred"))
