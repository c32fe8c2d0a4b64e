"""Ledgers for runs of fsck: many that are whole, and some with wrong metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from ledgers.writing import LedgerOptions
from tests.cluster.our_client import OurClient, our_client

WHOLE_COUNT = 40
ENTRY_COUNT = 10
PAYLOAD_BYTES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledgers:
    """Closed ledgers of ``ENTRY_COUNT`` entries, with two copies of each entry on two bookies."""

    whole: Sequence[int]
    lacking: int
    """A ledger with one copy that is not where the metadata says."""
    lost: int
    """A ledger whose metadata claims one entry too many."""

    @property
    def all(self) -> list[int]:
        return sorted([*self.whole, self.lacking, self.lost])

    @property
    def verdicts(self) -> Mapping[int, str]:
        """Return the verdicts of a run that reads everything, by ledger."""
        return {
            **dict.fromkeys(self.whole, "whole"),
            self.lacking: "at_risk",
            self.lost: "lost",
        }


async def make_ledgers(metadata_service_uri: str) -> Ledgers:
    async with our_client(metadata_service_uri) as client:
        whole = [await _write(client) for _ in range(WHOLE_COUNT)]
        lacking, lost = await _write(client), await _write(client)
        await _misname_a_bookie(client, lacking)
        await _promise_an_entry(client, lost)
    return Ledgers(whole=whole, lacking=lacking, lost=lost)


async def make_lost_ledger(metadata_service_uri: str) -> int:
    async with our_client(metadata_service_uri) as client:
        ledger_id = await _write(client)
        await _promise_an_entry(client, ledger_id)
        return ledger_id


async def delete_ledger(metadata_service_uri: str, ledger_id: int) -> None:
    async with our_client(metadata_service_uri) as client:
        versioned = await client.manager.read(ledger_id)
        await client.manager.delete(ledger_id, version=versioned.version)


def verdicts_of(output: Path, run: str) -> dict[int, str]:
    """Return the verdicts in the results of the run, and assert that each ledger has one row."""
    paths = sorted((output / "ledgers" / f"run={run}").glob("*.parquet"))
    rows = [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]
    found = {row["ledger_id"]: row["verdict"] for row in rows}
    assert len(found) == len(rows), "a ledger has two rows"
    return found


def written_parts(folder: Path) -> dict[str, int]:
    """Return when the rows of each part were written, in nanoseconds, by file name."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("part-*.parquet")}


async def _write(client: OurClient) -> int:
    options = LedgerOptions(ensemble_size=2, write_quorum=2, ack_quorum=2)
    async with client.create(options) as writer:
        for number in range(ENTRY_COUNT):
            await writer.add(b"%d" % number * PAYLOAD_BYTES)
        await writer.close()
        return writer.ledger_id


async def _misname_a_bookie(client: OurClient, ledger_id: int) -> None:
    """Write a bookie without any of the entries into the metadata."""
    versioned = await client.manager.read(ledger_id)
    segment = versioned.metadata.last_segment
    others = [each.bookie for each in await client.pool.writable()]
    stranger = next(bookie for bookie in others if bookie not in segment.ensemble)
    changed = versioned.metadata.with_segment(segment.with_bookies({0: stranger}))
    await client.manager.write(ledger_id, changed, read_as=versioned)


async def _promise_an_entry(client: OurClient, ledger_id: int) -> None:
    versioned = await client.manager.read(ledger_id)
    changed = versioned.metadata.closed(last_entry_id=ENTRY_COUNT, length=versioned.metadata.length)
    await client.manager.write(ledger_id, changed, read_as=versioned)
