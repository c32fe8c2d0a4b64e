"""Keeps a table of all ledgers in SQLite. Usage: python catalogue.py METADATA_SERVICE_URI FILE"""

import asyncio
import sqlite3
import sys

from checkpoints.client import ClientProcess, FeedChangedError, FeedClient, open_client
from checkpoints.model import CommittedVersion
from ledgers.errors import CorruptionError, SessionLostError, UnavailableError


class Catalogue:
    def __init__(self, file: str, client: FeedClient) -> None:
        self.client, self.changes = client, asyncio.Queue[CommittedVersion]()
        self.table = sqlite3.connect(file, isolation_level=None)  # each statement is committed
        self.table.execute(
            "CREATE TABLE IF NOT EXISTS ledgers (id INTEGER PRIMARY KEY, state TEXT)"
        )

    async def receive(self, committed: CommittedVersion) -> None:
        """The feed calls this for each change after subscribe."""
        self.changes.put_nowait(committed)

    async def update(self, ledger_id: int, version: int = 0) -> None:
        """Make the row equal to the metadata, which is at least as new as this version."""
        try:
            found = await self.client.metadata(ledger_id, version=version)
            state = found and found.metadata.state.name
        except CorruptionError:
            state = "UNREADABLE"
        if state:
            self.table.execute("REPLACE INTO ledgers VALUES (?, ?)", (ledger_id, state))
        else:
            self.delete(ledger_id)

    def delete(self, ledger_id: int) -> None:
        self.table.execute("DELETE FROM ledgers WHERE id = ?", (ledger_id,))

    async def handle(self, committed: CommittedVersion) -> None:
        if (ledger_id := committed.ledger_id) is not None:
            if committed.is_deleted:
                self.delete(ledger_id)
            else:
                await self.update(ledger_id, committed.version)
        self.client.service.submit_receipt(committed.key, committed.version)

    async def compare_with_all(self) -> None:
        """Make the table equal to what the log tells. Everything else follows as a change."""
        told = {ledger_id async for ledger_id in self.client.ledger_ids()}
        for (ledger_id,) in self.table.execute("SELECT id FROM ledgers").fetchall():
            if ledger_id not in told:
                self.delete(ledger_id)
        for ledger_id in told:
            await self.update(ledger_id)


async def follow(uri: str, file: str, process: ClientProcess) -> None:
    store = f"sqlite:///{file}"
    async with open_client(uri, name="catalogue", store=store, process=process) as client:
        catalogue = Catalogue(file, client)
        missed = await client.service.subscribe(catalogue)
        if missed.is_new or missed.lifted:  # the feed does not tell all that happened before
            await catalogue.compare_with_all()
        for committed in missed:
            await catalogue.handle(committed)
        while True:
            await catalogue.handle(await catalogue.changes.get())


async def main(uri: str, file: str) -> None:
    process = ClientProcess()  # a later process with the same name ends this one
    while True:
        try:
            await follow(uri, file, process)
        except (SessionLostError, FeedChangedError, UnavailableError, CorruptionError) as error:
            print(f"{error}. Next try in 5 s.", file=sys.stderr)
            await asyncio.sleep(5)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
