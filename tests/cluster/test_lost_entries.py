"""Ledgers with entries that no bookie has: they are split around these, and Java reads the rest."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.digest import EntryDigest
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment, write_set
from replication.ledger_record import WaitingNotes
from tests.cluster.commands import bookmender
from tests.cluster.our_client import OurClient, our_client, sha256_of
from tests.cluster.steps import NONEXISTENT, Bench, bench, nodes, wait_for
from tests.java.messages import Verdict
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 4}

LAST = 29
LOST = 13
PASSWORD = b"secret"
DIGEST = EntryDigest(DigestType.CRC32C, PASSWORD)
PAYLOADS = [b"entry %d" % entry_id * 20 for entry_id in range(LAST + 1)]
SOON = {
    "AUDITOR_ENABLED": "false",
    "REPLICATION_RETRY_MIN_S": "0.2",
    "REPLICATION_RETRY_MAX_S": "0.4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holed:
    """A closed ledger that misses one bookie in each write set, and all copies of one entry."""

    client: OurClient
    ledger_id: int
    ensemble: tuple[BookieId, ...]
    write_quorum: int

    @property
    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(
            ensemble_size=len(self.ensemble),
            write_quorum=self.write_quorum,
            ack_quorum=self.write_quorum,
            state=LedgerState.CLOSED,
            last_entry_id=LAST,
            length=sum(map(len, PAYLOADS)),
            password=PASSWORD,
            segments=(Segment(first_entry_id=0, ensemble=self.ensemble),),
        )

    async def make(self) -> None:
        for entry_id in range(LAST + 1):
            if entry_id != LOST:
                await self.put(entry_id)
        await self.client.manager.create(self.ledger_id, self.metadata)

    async def put(self, entry_id: int) -> None:
        """Store the entry on those bookies of its write set that exist, as a writer would have."""
        entry = DIGEST.pack(
            ledger_id=self.ledger_id,
            entry_id=entry_id,
            lac=entry_id - 1,
            length=sum(map(len, PAYLOADS[: entry_id + 1])),
            payload=PAYLOADS[entry_id],
        )
        indexes = write_set(
            entry_id, ensemble_size=len(self.ensemble), write_quorum=self.write_quorum
        )
        for bookie in (self.ensemble[index] for index in indexes):
            if bookie != NONEXISTENT:
                await self.client.bookies.add(
                    bookie, entry, master_key=DIGEST.master_key, is_recovery=True
                )

    async def segments(self) -> list[tuple[int, tuple[BookieId, ...]]]:
        found = (await self.client.manager.read(self.ledger_id)).metadata
        return [(segment.first_entry_id, segment.ensemble) for segment in found.segments]

    async def is_repaired(self) -> bool:
        return NONEXISTENT not in (await self.client.manager.read(self.ledger_id)).metadata.bookies


@pytest.mark.parametrize(
    ("size", "write_quorum"),
    [
        pytest.param(2, 2, marks=pytest.mark.long(group="repair"), id="not striped"),
        pytest.param(3, 2, id="striped: E 3, W 2"),
    ],
)
async def test_java_reads_a_ledger_split_around_a_lost_entry(
    size: int,
    write_quorum: int,
    module_cluster: LocalCluster,
    uri: str,
    java: JavaTool,
    tmp_path: Path,
) -> None:
    others = module_cluster.bookies[: size - 1]
    # Entry 13 is on bookie indexes 1 and 0 of two, and 1 and 2 of three.
    ensemble = (others[0], NONEXISTENT, *others[1:])

    async with our_client(uri) as client, bench(uri) as on, nodes(uri, tmp_path) as start:
        ledger = Holed(
            client=client,
            ledger_id=await client.manager.new_ledger_id(),
            ensemble=ensemble,
            write_quorum=write_quorum,
        )
        await ledger.make()
        await on.mark([ledger.ledger_id])
        await assert_planned(uri, ledger)

        start("node", settings=SOON)
        await wait_for(lambda: is_deferred(on, ledger), "reason")
        await assert_split(ledger, uri, java)

        await ledger.put(LOST)  # as if a bookie with the entry had returned
        await on.wait_idle()
        assert NONEXISTENT not in (await client.manager.read(ledger.ledger_id)).metadata.bookies
        await assert_reads_whole(ledger, uri, java)
        if size == 2:
            await assert_undone(uri, ledger, state=tmp_path / "node")
            await wait_for(ledger.is_repaired, "repair of the restored ledger")
            await assert_reads_whole(ledger, uri, java)


async def assert_planned(uri: str, ledger: Holed) -> None:
    """Assert that ``plan`` shows the copies, by ledger and from the queue, and changes nothing."""
    before = await ledger.client.manager.read(ledger.ledger_id)
    by_id, queued = await asyncio.gather(
        bookmender(uri, "plan", str(ledger.ledger_id), "--json"),
        bookmender(uri, "plan", "-o", "json"),
    )

    assert (by_id.exit_code, queued.exit_code) == (1, 1), by_id.err + queued.err
    [planned], [found] = by_id.record["ledgers"], queued.record["ledgers"]
    [copy] = planned["copies"]
    assert (copy["from"], copy["bookie_index"], copy["is_in_place"]) == (NONEXISTENT, 1, False)
    assert copy["to"] not in ledger.ensemble
    assert copy["entries"] == len(ledger_entries(ledger))
    assert found["ledger_id"] == ledger.ledger_id
    assert (await ledger.client.manager.read(ledger.ledger_id)).version == before.version


def ledger_entries(ledger: Holed) -> list[int]:
    """Return the entries that bookie index 1 stores."""
    return [
        entry_id
        for entry_id in range(LAST + 1)
        if 1
        in write_set(entry_id, ensemble_size=len(ledger.ensemble), write_quorum=ledger.write_quorum)
    ]


async def is_deferred(on: Bench, ledger: Holed) -> bool:
    note = await WaitingNotes(on.seen.store, on.seen.paths).read(ledger.ledger_id)
    return (
        note is not None
        and note.reason.value == "no-copy"
        and note.blocked.facts.entry_ids == (LOST,)
    )


async def assert_split(ledger: Holed, uri: str, java: JavaTool) -> None:
    before, place, after = await ledger.segments()
    assert [start for start, _ in (before, place, after)] == [0, LOST, LOST + 1]
    assert place[1] == ledger.ensemble
    assert before[1] == after[1]
    assert NONEXISTENT not in before[1]

    report = await asyncio.to_thread(java.judge, uri, [ledger.ledger_id])
    verdict = report.ledgers[ledger.ledger_id]
    assert verdict.copies == ledger.write_quorum * (LAST + 1)
    assert verdict.good == ledger.write_quorum * LAST, "all except the lost entry"
    read = await asyncio.to_thread(java.read, uri, ledger.ledger_id, last=LOST - 1)
    assert (read.last, read.sha256) == (LOST - 1, sha256_of(PAYLOADS[:LOST]))


async def assert_reads_whole(ledger: Holed, uri: str, java: JavaTool) -> None:
    report = await asyncio.to_thread(java.judge, uri, [ledger.ledger_id])
    assert report.ledgers[ledger.ledger_id].verdict is Verdict.WHOLE
    read = await asyncio.to_thread(java.read, uri, ledger.ledger_id)
    assert (read.last, read.sha256) == (LAST, sha256_of(PAYLOADS))


async def assert_undone(uri: str, ledger: Holed, *, state: Path) -> None:
    """Undo the node's last write from its journal: preview it, have it refused, then force it."""
    command = ("ledger", "restore", str(ledger.ledger_id))
    listed = await bookmender(uri, *command, "-o", "json", state=state)
    last = str(listed.record["writes"][-1]["time_ms"])
    before = await ledger.client.manager.read(ledger.ledger_id)

    shown = await bookmender(uri, *command, "--at", last, state=state)
    assert shown.exit_code == 1, shown.err  # as with --yes
    assert "nothing was changed" in shown.out

    refused = await bookmender(uri, *command, "--at", last, "--yes", state=state)
    assert refused.exit_code == 1
    assert f"{NONEXISTENT} is not registered" in refused.err
    assert (await ledger.client.manager.read(ledger.ledger_id)).version == before.version

    done = await bookmender(uri, *command, "--at", last, "--yes", "--force", state=state)
    assert done.exit_code == 0, done.err
    after = await ledger.client.manager.read(ledger.ledger_id)
    assert after.version > before.version
