"""Keeps what the feed tells of all ledgers in SQLite, as a follower of ``make feed-demo``.

Usage: ``python -m tests.feed_catalogue METADATA_SERVICE_URI NAME STORE FILE``. It is built as
``docs/examples/catalogue.py``, but it stores the versions and fingerprints of the feed itself. The
example stores what it reads in ZooKeeper, which would hide a wrong version.
"""

import asyncio
import sqlite3
import sys

from checkpoints.client import ClientProcess, FeedChangedError, FeedClient, open_client
from checkpoints.collector import fingerprint_of
from checkpoints.model import CommittedVersion
from ledgers.errors import SessionLostError, UnavailableError

RETRY_S = 1.0


class ToldCatalogue:
    """The version and fingerprint of each ledger. A deleted one keeps its row, without
    fingerprint."""

    def __init__(self, file: str, client: FeedClient) -> None:
        self.client, self.changes = client, asyncio.Queue[CommittedVersion]()
        self.table = sqlite3.connect(file, isolation_level=None)
        # Each statement is committed. It survives the end of this process, not that of the machine.
        self.table.execute("PRAGMA synchronous = OFF")
        self.table.execute(
            "CREATE TABLE IF NOT EXISTS ledgers (id INTEGER PRIMARY KEY, version INTEGER, "
            "fingerprint TEXT, told_count INTEGER)"
        )

    async def receive(self, committed: CommittedVersion) -> None:
        self.changes.put_nowait(committed)

    def note(self, ledger_id: int, version: int, fingerprint: int | None) -> None:
        """Store a version, unless a later one is known: the comparison may be ahead of the feed."""
        text = None if fingerprint is None else f"{fingerprint:016x}"
        self.table.execute(
            "INSERT INTO ledgers VALUES (?, ?, ?, 1) ON CONFLICT (id) DO UPDATE SET "
            "told_count = told_count + 1, "
            "fingerprint = iif(excluded.version >= version, excluded.fingerprint, fingerprint), "
            "version = max(version, excluded.version)",
            (ledger_id, version, text),
        )

    def handle(self, committed: CommittedVersion) -> None:
        if (ledger_id := committed.ledger_id) is not None:
            self.note(ledger_id, committed.version, committed.fingerprint)
        self.client.service.submit_receipt(committed.key, committed.version)

    async def compare_with_all(self) -> None:
        """Make the table equal to what the log tells, or to a later state."""
        told = {ledger_id async for ledger_id in self.client.ledger_ids()}
        for (ledger_id,) in self.table.execute("SELECT id FROM ledgers").fetchall():
            if ledger_id not in told:
                self.table.execute("DELETE FROM ledgers WHERE id = ?", (ledger_id,))
        for ledger_id in told:
            found = await self.client.metadata(ledger_id)
            if found is None:
                self.table.execute("DELETE FROM ledgers WHERE id = ?", (ledger_id,))
            else:
                self.note(ledger_id, found.stat.mzxid, fingerprint_of(found.data))


async def follow(uri: str, name: str, store: str, file: str, process: ClientProcess) -> None:
    async with open_client(uri, name=name, store=store, process=process) as client:
        catalogue = ToldCatalogue(file, client)
        missed = await client.service.subscribe(catalogue)
        if missed.is_new or missed.lifted:
            await catalogue.compare_with_all()
        for committed in missed:
            catalogue.handle(committed)
        while True:
            catalogue.handle(await catalogue.changes.get())


async def main(uri: str, name: str, store: str, file: str) -> None:
    process = ClientProcess()
    while True:
        try:
            await follow(uri, name, store, file, process)
        except (SessionLostError, FeedChangedError, UnavailableError) as error:
            print(f"{error}. Next try in {RETRY_S:g} s.", file=sys.stderr, flush=True)
            await asyncio.sleep(RETRY_S)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
