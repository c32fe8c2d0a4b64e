"""The contract of ``MetadataStore`` for suspended, closed and lost sessions."""

import asyncio

import pytest

from ledgers.errors import SessionLostError, UnknownOutcomeError
from ledgers.store import ANY_VERSION, Check, Create, MetadataStore, SessionState
from tests.contract.metadata_stores import Backend, on_loop


@on_loop
async def test_sessions_have_different_ids(backend: Backend) -> None:
    first, second = await backend.open(), await backend.open()

    assert first.state is second.state is SessionState.CONNECTED
    assert 0 != first.session_id != second.session_id != 0


@on_loop
async def test_ephemeral_znodes_are_deleted_with_their_closed_session(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    await store.create(f"{backend.root}/ephemeral", is_ephemeral=True)
    await store.create(f"{backend.root}/persistent")
    stat = await other.exists(f"{backend.root}/ephemeral")
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id

    await store.close()

    assert await other.children(backend.root) == ["persistent"]


@pytest.mark.compat("BookKeeperCloseTest.testBookKeeperAdmin", verdict="same")
@on_loop
async def test_a_closed_store_refuses_every_call(backend: Backend) -> None:
    """It may be closed again."""
    store = await backend.open()

    await store.close()
    await store.close()

    assert store.state is SessionState.LOST
    await store.wait_lost()
    await _assert_over(store, backend.root)


async def _assert_over(store: MetadataStore, path: str) -> None:
    """Assert that every call raises SessionLostError."""
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
async def test_calls_wait_while_suspended_and_continue_when_connected(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/ephemeral", is_ephemeral=True)
    session_id = store.session_id

    await backend.suspend(store)
    await store.wait_disconnected()
    assert store.state is SessionState.SUSPENDED
    async with asyncio.TaskGroup() as tasks:
        read = tasks.create_task(store.get(backend.root))
        write = tasks.create_task(store.create(f"{backend.root}/a"))
        connected = tasks.create_task(store.wait_connected())
        await asyncio.sleep(0)
        assert not any(call.done() for call in (read, write, connected))
        await backend.resume(store)

    assert store.session_id == session_id
    assert set(await store.children(backend.root)) == {"ephemeral", "a"}


@on_loop
async def test_a_write_whose_reply_is_lost_has_an_unknown_outcome(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()

    with pytest.raises(UnknownOutcomeError):
        await backend.lose_reply(store, store.create(f"{backend.root}/a", b"data"))

    assert (await other.get(f"{backend.root}/a"))[0] == b"data"
    await store.wait_connected()
    assert (await store.get(f"{backend.root}/a"))[0] == b"data"


@on_loop
async def test_a_transaction_without_a_reply_has_an_unknown_outcome(backend: Backend) -> None:
    store = await backend.open()

    with pytest.raises(UnknownOutcomeError):
        await backend.lose_reply(store, store.multi([Create(path=f"{backend.root}/a")]))

    assert await store.children(backend.root) == ["a"]


@on_loop
async def test_a_read_whose_reply_is_lost_is_sent_again(backend: Backend) -> None:
    store = await backend.open()
    await store.create(f"{backend.root}/a", b"data")

    data, _ = await backend.lose_reply(store, store.get(f"{backend.root}/a"))

    assert data == b"data"


@on_loop
async def test_an_expired_session_is_lost_with_its_ephemeral_znodes(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    await store.create(f"{backend.root}/ephemeral", is_ephemeral=True)

    await backend.expire(store)

    await store.wait_lost()
    assert store.state is SessionState.LOST
    await _assert_over(store, backend.root)
    assert await other.children(backend.root) == []


@on_loop
async def test_calls_that_wait_while_suspended_end_with_the_session(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    await store.create(f"{backend.root}/ephemeral", is_ephemeral=True)
    await backend.suspend(store)
    calls = [
        store.get(backend.root),
        store.create(f"{backend.root}/a"),
        store.wait_connected(),
        store.wait_lost(),
    ]
    waiting = asyncio.gather(*calls, return_exceptions=True)

    await backend.expire(store)
    await backend.resume(store)

    *errors, lost = await waiting
    assert [type(error) for error in errors] == [SessionLostError] * 3
    assert lost is None
    assert await other.children(backend.root) == []
