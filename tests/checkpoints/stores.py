"""Receipt stores of every kind, for the tests that all of them pass."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest

from checkpoints.receipts import ClientProcess, ReceiptRange, ReceiptStore
from checkpoints.stores.sql import SqlReceiptStore
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from ledgers.store import MetadataStore
from tests.memory.feed import MemoryReceipts
from tests.memory.store import MemoryStore, MemoryTree
from tests.zookeeper_server import ZooKeeperServer, opened

KINDS = [
    "memory",
    "sqlite",
    "postgresql",
    "znodes in memory",
    pytest.param("zookeeper", marks=pytest.mark.cluster),
]
"""Parameters of a fixture."""

TEST_TIMEOUT_S = 120
_numbers = itertools.count()


class OpenStore(Protocol):
    """Opens the store of a client."""

    def __call__(
        self, client: str, process: ClientProcess | None = None, /
    ) -> Awaitable[ReceiptStore]: ...


Scenario = Callable[[OpenStore], Awaitable[None]]
RunScenario = Callable[[Scenario], None]


def run_on(request: pytest.FixtureRequest, tmp_path: Path) -> RunScenario:
    """Return a function that runs a scenario on an empty store of the kind in ``request``."""
    # Tests share the servers, so each has clients and a folder of its own.
    prefix = f"test-{next(_numbers)}-"

    async def prepare(stack: AsyncExitStack) -> OpenStore:
        match request.param:
            case "memory":
                return MemoryReceipts().open
            case "sqlite":
                url = f"sqlite:///{tmp_path / 'feed.db'}"
            case "postgresql":
                url = request.getfixturevalue("postgresql")
            case "znodes in memory":
                return _in_znodes(MemoryStore(MemoryTree()))
            case _:
                server: ZooKeeperServer = request.getfixturevalue("zookeeper")
                return _in_znodes(await stack.enter_async_context(opened(server)))

        async def open_sql(client: str, process: ClientProcess | None = None) -> ReceiptStore:
            store = await SqlReceiptStore.open(url, client=prefix + client, process=process)
            stack.push_async_callback(store.close)
            return store

        return open_sql

    def _in_znodes(store: MetadataStore) -> OpenStore:
        return lambda client, process=None: ZooKeeperReceiptStore.open(
            store, folder=f"/{prefix}clients", client=client, process=process
        )

    if request.param in ("postgresql", "zookeeper"):
        request.getfixturevalue(request.param)  # started or skipped outside of the loop

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with AsyncExitStack() as stack, asyncio.timeout(TEST_TIMEOUT_S):
                await scenario(await prepare(stack))

        asyncio.run(main())

    return run


async def receipts(store: ReceiptStore, antecedent: int = 0) -> list[ReceiptRange]:
    """Return the stored receipts in the order of the store."""
    return [each async for each in store.get_checkpoint_range_receipts(antecedent)]


async def receipted(store: ReceiptStore) -> set[int]:
    """Return the ids that the receipts cover. Stores may merge ranges that touch."""
    return {id for begin, end in await receipts(store) for id in range(begin, end + 1)}
