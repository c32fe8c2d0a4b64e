"""Which servers live: each keeps an ephemeral znode. Clients spread themselves over them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct

from ledgers.errors import NoNodeError, UnauthorizedError
from ledgers.store import ANY_VERSION, MetadataStore
from notifications.protocol import Positions
from replication.znodes import ClusterPaths, ensure_znode

STALE_S = 30.0
"""A server that has heard nothing for so long is stale."""
MORE, MORE_CLIENTS_MIN = 1.25, 100
"""A server has far more clients than the mean if it has so many times and so many more."""
MOVED_AT_ONCE = 50


class ServerRecord(Struct, frozen=True, kw_only=True):
    """A server, as it wrote at ``written_ms``. ``url``: where clients reach it. ``positions``: up
    to where it knows all changes; ``age_s``: since when it has heard nothing new."""

    server: str
    url: str
    started_ms: int
    written_ms: int
    clients: int = 0
    age_s: float = 0.0
    positions: Positions = {}


class ClientRecord(Struct, frozen=True, kw_only=True):
    """A connected client. ``objects``: its registrations; ``waiting``: what it is still to be told.
    ``is_congested``: it reads more slowly than it is told."""

    client: str
    name: str
    objects: int
    waiting: int
    heard_s: float
    is_congested: bool
    server: str = ""
    """The URL of its server."""


_decoder = msgspec.json.Decoder(ServerRecord)


async def write_server(store: MetadataStore, paths: ClusterPaths, record: ServerRecord) -> None:
    """Say that a server lives, for the life of the session. Raises UnavailableError."""
    path, data = f"{paths.notify}/{record.server}", msgspec.json.encode(record)
    try:
        await store.set(path, data, version=ANY_VERSION)
    except NoNodeError:
        await ensure_znode(store, paths.notify)
        await store.create(path, data, is_ephemeral=True)


async def remove_server(store: MetadataStore, paths: ClusterPaths, server: str) -> None:
    await store.delete(f"{paths.notify}/{server}")


async def read_servers(store: MetadataStore, paths: ClusterPaths) -> list[ServerRecord]:
    """Return the living servers by id, as far as ACLs show them. Raises UnavailableError."""
    try:
        names = sorted(await store.children(paths.notify))
    except (NoNodeError, UnauthorizedError):
        return []

    async def read(name: str) -> ServerRecord | None:
        try:
            data, _ = await store.get(f"{paths.notify}/{name}")
            return _decoder.decode(data)
        except (NoNodeError, UnauthorizedError, msgspec.MsgspecError):
            return None

    found = await asyncio.gather(*(read(name) for name in names))
    return [record for record in found if record is not None]


def in_order_of(client: str, urls: Iterable[str]) -> Sequence[str]:
    """Return the servers in the order in which a client tries them. Each client has an order of its
    own (rendezvous hashing), so the clients of a lost server spread over all others."""
    return sorted(urls, key=lambda url: blake2b(f"{client} {url}".encode()).digest())


def to_send_away(own: ServerRecord, servers: Sequence[ServerRecord]) -> int:
    """Return how many clients a server sends to the others now: none unless it has far more than
    the mean."""
    mean = sum(record.clients for record in servers) / max(1, len(servers))
    has_far_more = own.clients > MORE * mean and own.clients - mean >= MORE_CLIENTS_MIN
    return min(MOVED_AT_ONCE, int(own.clients - mean)) if has_far_more else 0
