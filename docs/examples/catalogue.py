"""Keeps a table of all ledgers in SQLite. Usage: python catalogue.py METADATA_SERVICE_URI FILE"""

import asyncio
import sqlite3
import sys

from checkpoints.client import ClientProcess, FeedChangedError, FeedClient, open_client
from checkpoints.model import CommittedVersion
from ledgers.errors import CorruptionError, SessionLostError, UnavailableError

WAITING_MAX = 1_000


class Catalogue:
    def __init__(self, file: str, client: FeedClient) -> None:
        self.client, self.condition = client, asyncio.Condition()
        self.waiting: dict[bytes, CommittedVersion] = {}  # the latest change of each ledger
        self.is_subscribed = False
        self.table = sqlite3.connect(file, isolation_level=None)  # each statement is committed
        self.table.execute(
            "CREATE TABLE IF NOT EXISTS ledgers (id INTEGER PRIMARY KEY, state TEXT)"
        )

    async def receive(self, committed: CommittedVersion) -> None:
        """The feed calls this for each change, one after the other. It waits if we are slow."""
        async with self.condition:
            await self.condition.wait_for(self.has_room)
            self.waiting[committed.key] = committed
            self.condition.notify_all()

    def has_room(self) -> bool:
        return not self.is_subscribed or len(self.waiting) < WAITING_MAX

    async def next_change(self) -> CommittedVersion:
        async with self.condition:
            await self.condition.wait_for(lambda: self.waiting)
            self.condition.notify_all()
            return self.waiting.pop(next(iter(self.waiting)))

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
        catalogue.is_subscribed = True  # subscribe gives few changes, and must not wait for us
        if missed.is_new or missed.lifted:  # the feed does not tell all that happened before
            await catalogue.compare_with_all()
        for committed in missed:
            await catalogue.handle(committed)
        while True:
            await catalogue.handle(await catalogue.next_change())


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
