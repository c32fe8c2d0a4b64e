"""The registered bookies as ``Registration`` reads them, in memory and in ZooKeeper."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from ledgers.codec.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from ledgers.codec.registration import Address
from ledgers.errors import SessionLostError, UnavailableError
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.store import MetadataStore
from tests.contract.metadata_stores import Backend, on_loop

A, B, C = (BookieId(f"bookie-{letter}:3181") for letter in "abc")


def info(host: str) -> bytes:
    message = BookieServiceInfoFormat()
    message.endpoints.add(id="bookie", host=host, port=3181, protocol="bookie-rpc")
    return message.SerializeToString()


class Cluster:
    """The znodes of bookies, as bookies create them."""

    def __init__(self, store: MetadataStore, root: str) -> None:
        self.store, self.root = store, root

    @classmethod
    async def format(cls, backend: Backend) -> "Cluster":
        cluster = cls(await backend.open(), backend.root)
        await cluster.store.create(f"{backend.root}/available/readonly", with_parents=True)
        return cluster

    async def register(self, bookie: str, data: bytes = b"", *, is_read_only: bool = False) -> None:
        await self.store.create(self._path(bookie, is_read_only), data, is_ephemeral=True)

    async def unregister(self, bookie: str, *, is_read_only: bool = False) -> None:
        await self.store.delete(self._path(bookie, is_read_only))

    async def to_read_only(self, bookie: str) -> None:
        await self.register(bookie, is_read_only=True)
        await self.unregister(bookie)

    async def to_writable(self, bookie: str) -> None:
        await self.register(bookie)
        await self.unregister(bookie, is_read_only=True)

    def _path(self, bookie: str, is_read_only: bool) -> str:
        return f"{self.root}/available/{'readonly/' if is_read_only else ''}{bookie}"


@pytest.mark.compat("BookKeeperAdminTest.testGetBookies", verdict="same")
@on_loop
async def test_writable_and_read_only_bookies_are_distinguished(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    await cluster.register(A)
    await cluster.register(B, is_read_only=True)

    view = await Registration(cluster.store, backend.root).read()

    assert (set(view.writable), set(view.read_only)) == ({A}, {B})
    assert set(view.available) == {A, B}
    assert view.writable[A].is_writable
    assert not view.read_only[B].is_writable


@on_loop
async def test_the_address_is_the_registered_one_or_the_id(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    await cluster.register(A, info("192.0.2.7"))
    await cluster.register(B)
    await cluster.register("opaque")
    await cluster.register(C, b"\xff scribble")

    view = await Registration(cluster.store, backend.root).read()

    assert view.address(A) == Address(host="192.0.2.7", port=3181)
    assert view.address(B) == Address(host="bookie-b", port=3181)
    assert view.address(C) == Address(host="bookie-c", port=3181)
    assert view.address(BookieId("opaque")) is None
    assert view.address(BookieId("absent:3181")) is None


@on_loop
async def test_a_bookie_that_registers_again_has_another_czxid(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    registration = Registration(cluster.store, backend.root)
    await cluster.register(A, info("192.0.2.1"))
    before = (await registration.read()).available[A]

    await cluster.unregister(A)
    await cluster.register(A, info("192.0.2.2"))
    after = (await registration.read()).available[A]

    assert after.czxid > before.czxid
    assert after.address == Address(host="192.0.2.2", port=3181)


@on_loop
async def test_reading_again_without_a_change_returns_the_same(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    registration = Registration(cluster.store, backend.root)
    await cluster.register(A, info("192.0.2.1"))
    first = await registration.read()
    before = cluster.store.request_count

    second = await registration.read()

    assert second == first
    # A sync, three listings, one look at A, and one at each list, which may share a request.
    assert cluster.store.request_count - before <= 7


@pytest.mark.parametrize("is_read_only", [False, True], ids=["writable", "read-only"])
@on_loop
async def test_the_zxid_of_a_view_is_that_of_the_last_disappearance(
    backend: Backend, is_read_only: bool
) -> None:
    cluster = await Cluster.format(backend)
    await cluster.register(A)
    await cluster.register(B, is_read_only=is_read_only)
    await cluster.store.create(f"{backend.root}/earlier")
    await cluster.unregister(B, is_read_only=is_read_only)
    await cluster.store.create(f"{backend.root}/later")

    view = await Registration(cluster.store, backend.root).read()

    _, earlier = await cluster.store.get(f"{backend.root}/earlier")
    _, later = await cluster.store.get(f"{backend.root}/later")
    assert earlier.czxid < view.zxid < later.czxid


@on_loop
async def test_an_empty_list_is_unknown_and_no_mass_failure(backend: Backend) -> None:
    cluster = await Cluster.format(backend)

    with pytest.raises(UnavailableError, match="no bookie is registered at all"):
        await Registration(cluster.store, backend.root).read()


@on_loop
async def test_a_missing_list_is_unknown(backend: Backend) -> None:
    store = await backend.open()

    with pytest.raises(UnavailableError, match="list of bookies is missing"):
        await Registration(store, backend.root).read()


@on_loop
async def test_read_only_bookies_alone_are_a_view(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    await cluster.register(A, is_read_only=True)

    view = await Registration(cluster.store, backend.root).read()

    assert (set(view.writable), set(view.read_only)) == (set(), {A})


class BetweenRequests:
    """A store on which something happens before its n-th read."""

    def __init__(self, store: MetadataStore, n: int, happens: Callable[[], Awaitable[None]]):
        self._store, self._left, self._happens = store, n, happens

    @property
    def has_happened(self) -> bool:
        return self._left < 0

    async def sync(self, path: str) -> None:
        await self._store.sync(path)

    async def children(self, path: str) -> list[str]:
        await self._count()
        return await self._store.children(path)

    async def get(self, path: str) -> object:
        await self._count()
        return await self._store.get(path)

    async def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            await self._happens()


@pytest.mark.parametrize("n", range(5))
@pytest.mark.parametrize("becomes_read_only", [True, False], ids=["read-only", "writable"])
@on_loop
async def test_a_bookie_that_changes_its_mode_is_never_absent(
    backend: Backend, n: int, becomes_read_only: bool
) -> None:
    """Rule S8, at every step of the reading."""
    cluster = await Cluster.format(backend)
    await cluster.register(A, is_read_only=not becomes_read_only)
    await cluster.register(B)
    change = cluster.to_read_only if becomes_read_only else cluster.to_writable
    store = BetweenRequests(cluster.store, n, lambda: change(A))

    view = await Registration(store, backend.root).read()  # type: ignore[arg-type]  # reads only

    assert set(view.available) == {A, B}
    assert store.has_happened


@on_loop
async def test_a_bookie_that_disappears_during_the_reading_is_absent(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    await cluster.register(A)
    await cluster.register(B)
    store = BetweenRequests(cluster.store, 3, lambda: cluster.unregister(A))

    view = await Registration(store, backend.root).read()  # type: ignore[arg-type]  # reads only

    assert set(view.available) == {B}


@on_loop
async def test_cookies_name_every_bookie_that_ever_existed(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    registration = Registration(cluster.store, backend.root)
    assert await registration.cookies() == {}
    paths = {bookie: f"{backend.root}/cookies/{bookie}" for bookie in (A, B)}
    for path in paths.values():
        await cluster.store.create(path, b"5\n", with_parents=True)

    cookies = await registration.cookies()

    assert cookies == {bookie: await cluster.store.exists(path) for bookie, path in paths.items()}


@on_loop
async def test_every_change_of_the_bookies_is_reported(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    registration = Registration(await backend.open(), backend.root)

    async with aclosing(registration.changes()) as changes:
        await anext(changes)
        for change in (
            cluster.register(A),
            cluster.register(B, is_read_only=True),
            cluster.unregister(A),
            cluster.unregister(B, is_read_only=True),
        ):
            await change
            await anext(changes)


@on_loop
async def test_unread_changes_are_reported_as_one(backend: Backend) -> None:
    cluster = await Cluster.format(backend)
    registration = Registration(cluster.store, backend.root)

    async with aclosing(registration.changes()) as changes:
        await anext(changes)
        for number in range(100):
            await cluster.register(f"bookie-{number}:3181")
        await anext(changes)
        view = await registration.read()
        further = asyncio.ensure_future(anext(changes))
        await cluster.store.sync(backend.root)
        assert len(view.available) == 100
        assert not further.done()
        await cluster.register(A)
        await further


@on_loop
async def test_changes_end_with_the_session(backend: Backend) -> None:
    cluster = await Cluster.format(backend)

    async with aclosing(Registration(cluster.store, backend.root).changes()) as changes:
        await anext(changes)
        await cluster.store.close()

        with pytest.raises(SessionLostError):
            await anext(changes)
