"""Which servers live, and how clients spread over them."""

from __future__ import annotations

from collections import Counter

import pytest

from notifications.discovery import (
    ServerRecord,
    in_order_of,
    read_servers,
    remove_server,
    to_send_away,
    write_server,
)
from replication.znodes import ClusterPaths
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.cluster import in_virtual_time

PATHS = ClusterPaths.below("/ledgers")


def record(server: str, clients: int = 0) -> ServerRecord:
    url = f"http://{server}:7319"
    return ServerRecord(server=server, url=url, started_ms=1, written_ms=2, clients=clients)


@in_virtual_time
async def test_a_server_is_listed_while_its_session_lives() -> None:
    tree = MemoryTree()
    mine, other = MemoryStore(tree), MemoryStore(tree)

    await write_server(mine, PATHS, record("one", 1))
    await write_server(mine, PATHS, record("one", 2))
    await write_server(other, PATHS, record("two"))
    assert await read_servers(mine, PATHS) == [record("one", 2), record("two")]

    await other.close()
    assert await read_servers(mine, PATHS) == [record("one", 2)]
    await remove_server(mine, PATHS, "one")
    assert await read_servers(mine, PATHS) == []


@in_virtual_time
async def test_an_unreadable_record_hides_no_other() -> None:
    store = MemoryStore(MemoryTree())
    await write_server(store, PATHS, record("one"))
    await store.create(f"{PATHS.notify}/two", b"{")

    assert await read_servers(store, PATHS) == [record("one")]


def test_the_clients_of_a_lost_server_spread_over_all_others() -> None:
    urls = ["http://a", "http://b", "http://c"]
    orders = [in_order_of(str(client), urls) for client in range(3_000)]

    assert all(900 < count < 1_100 for count in Counter(order[0] for order in orders).values())
    next_after_a = Counter(order[1] for order in orders if order[0] == "http://a")
    assert all(400 < count < 600 for count in next_after_a.values())


@pytest.mark.parametrize(
    ("own", "others", "count"),
    [(100, [0], 0), (124, [0], 0), (300, [290], 0), (400, [0], 50), (230, [0], 50)],
)
def test_a_server_with_far_more_clients_sends_some_away(
    own: int, others: list[int], count: int
) -> None:
    servers = [record("own", own), *(record(f"{n}", each) for n, each in enumerate(others))]

    assert to_send_away(servers[0], servers) == count
