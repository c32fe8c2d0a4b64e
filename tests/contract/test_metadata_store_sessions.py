"""What becomes of every ``MetadataStore`` when its session is suspended, closed or lost."""

import asyncio

import pytest

from ledgers.errors import SessionLostError, UnknownOutcomeError
from ledgers.store import ANY_VERSION, Check, Create, MetadataStore, SessionState
from tests.contract.metadata_stores import World, on_loop


@on_loop
async def test_sessions_have_ids_of_their_own(world: World) -> None:
    first, second = await world.open(), await world.open()

    assert first.state is second.state is SessionState.CONNECTED
    assert 0 != first.session_id != second.session_id != 0


@on_loop
async def test_ephemeral_znodes_go_with_the_session_that_is_closed(world: World) -> None:
    store, other = await world.open(), await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)
    await store.create(f"{world.root}/persistent")
    stat = await other.exists(f"{world.root}/ephemeral")
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id

    await store.close()

    assert await other.children(world.root) == ["persistent"]


@pytest.mark.compat("BookKeeperCloseTest.testBookKeeperAdmin", verdict="same")
@on_loop
async def test_a_closed_store_refuses_every_call_and_may_be_closed_again(world: World) -> None:
    store = await world.open()

    await store.close()
    await store.close()

    assert store.state is SessionState.LOST
    await store.wait_lost()
    await _assert_over(store, world.root)


async def _assert_over(store: MetadataStore, path: str) -> None:
    """Every call raises SessionLostError."""
    for call in (
        store.get(path),
        store.exists(path),
        store.children(path),
        store.sync(path),
        store.create(f"{path}/over"),
        store.set(path, b"", version=ANY_VERSION),
        store.delete(path),
        store.multi([Check(path=path)]),
        store.wait_connected(),
        anext(store.watch(path)),
    ):
        with pytest.raises(SessionLostError):
            await call


@on_loop
async def test_calls_wait_while_suspended_and_go_on_when_connected_again(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)
    session_id = store.session_id

    await world.suspend(store)
    await store.wait_disconnected()
    assert store.state is SessionState.SUSPENDED
    async with asyncio.TaskGroup() as tasks:
        read = tasks.create_task(store.get(world.root))
        write = tasks.create_task(store.create(f"{world.root}/a"))
        connected = tasks.create_task(store.wait_connected())
        await asyncio.sleep(0)
        assert not any(call.done() for call in (read, write, connected))
        await world.resume(store)

    assert store.session_id == session_id
    assert set(await store.children(world.root)) == {"ephemeral", "a"}


@on_loop
async def test_a_write_whose_reply_is_lost_has_an_unknown_outcome(world: World) -> None:
    store, other = await world.open(), await world.open()

    with pytest.raises(UnknownOutcomeError):
        await world.lose_reply(store, store.create(f"{world.root}/a", b"data"))

    assert (await other.get(f"{world.root}/a"))[0] == b"data"
    await store.wait_connected()
    assert (await store.get(f"{world.root}/a"))[0] == b"data"


@on_loop
async def test_a_transaction_whose_reply_is_lost_has_an_unknown_outcome(world: World) -> None:
    store = await world.open()

    with pytest.raises(UnknownOutcomeError):
        await world.lose_reply(store, store.multi([Create(path=f"{world.root}/a")]))

    assert await store.children(world.root) == ["a"]


@on_loop
async def test_a_read_whose_reply_is_lost_is_asked_again(world: World) -> None:
    store = await world.open()
    await store.create(f"{world.root}/a", b"data")

    data, _ = await world.lose_reply(store, store.get(f"{world.root}/a"))

    assert data == b"data"


@on_loop
async def test_an_expired_session_is_lost_with_all_that_it_held(world: World) -> None:
    store, other = await world.open(), await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)

    await world.expire(store)

    await store.wait_lost()
    assert store.state is SessionState.LOST
    await _assert_over(store, world.root)
    assert await other.children(world.root) == []


@on_loop
async def test_calls_that_wait_while_suspended_end_with_the_session(world: World) -> None:
    store, other = await world.open(), await world.open()
    await store.create(f"{world.root}/ephemeral", is_ephemeral=True)
    await world.suspend(store)
    calls = [
        store.get(world.root),
        store.create(f"{world.root}/a"),
        store.wait_connected(),
        store.wait_lost(),
    ]
    waiting = asyncio.gather(*calls, return_exceptions=True)

    await world.expire(store)
    await world.resume(store)

    *errors, lost = await waiting
    assert [type(error) for error in errors] == [SessionLostError] * 3
    assert lost is None
    assert await other.children(world.root) == []
