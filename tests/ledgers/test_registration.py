"""Registrations: denied access, names that no bookie can have, and the instance id."""

import asyncio

import pytest
from structlog.testing import capture_logs

from auditor.underreplication import reformatted_bookies
from ledgers.errors import UnavailableError
from ledgers.registration import Registration, read_instance_id
from replication.cluster import ViewSource
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import ROOT
from tests.virtual_time import run


@pytest.mark.parametrize("is_stat_open", [False, True], ids=["3.9.5", "older"])
@in_virtual_time
async def test_a_bookie_with_denied_access_is_registered_but_no_target(is_stat_open: bool) -> None:
    """All others are as before."""
    cluster = await Cluster.start(B1, B2, B3)
    registration = Registration(cluster.store, ROOT)
    before = await registration.read()
    shut = shut_out(cluster.store, f"{ROOT}/available/{B2}", is_stat_open=is_stat_open)

    with capture_logs() as logs:
        seen = [await registration.read() for _ in range(2)]

    for view in seen:
        assert view.available.keys() == {B1, B2, B3}
        assert view.writable.keys() == {B1, B3}
    assert seen[0].address(B2) == before.address(B2)
    told = [each for each in logs if each["event"] == "registration.access_denied"]
    assert [(each["bookie"], each["log_level"]) for each in told] == [(B2, "error")]
    shut.clear()
    assert await registration.read() == before


@in_virtual_time
async def test_views_continue_with_denied_access() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    shut_out(cluster.store, f"{ROOT}/available/{B2}")
    running = asyncio.create_task(views.run())

    await cluster.kill(B3)
    await asyncio.sleep(30)

    assert not running.done()
    assert views.current.available == {B1, B2}
    running.cancel()


@in_virtual_time
async def test_a_denial_without_a_readable_cookie_proves_nothing() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    before = await views.refresh()
    now_zxid = max(cookie.czxid for cookie in before.cookies.values())
    shut_out(cluster.store, f"{ROOT}/cookies/{B2}")

    with capture_logs() as logs:
        views_then = [await views.refresh() for _ in range(2)]

    for view in views_then:
        assert view.available == {B1, B2, B3}
        assert view.initialised_after(now_zxid) == {B2}
        known = {bookie: cookie.czxid for bookie, cookie in before.cookies.items()}
        assert not reformatted_bookies(view.cookies, known)
    assert await views.set_up_since(before, [B1, B2, B3]) == {B2}
    told = [each for each in logs if each["event"] == "cookie.access_denied"]
    assert [(each["bookie"], each["log_level"]) for each in told] == [(B2, "error")]


# --- Names that cannot be of bookies --------------------------------------------------------------


JUNK = "bookie 1 (old)"


@pytest.mark.parametrize("parent", ["available", "available/readonly"])
@in_virtual_time
async def test_names_that_cannot_be_bookies_are_ignored(parent: str) -> None:
    cluster = await Cluster.start(B1, B2)
    registration = Registration(cluster.store, ROOT)
    before = await registration.read()
    path = f"{ROOT}/{parent}/{JUNK}"
    await cluster.store.create(path, with_parents=True)

    with capture_logs() as logs:
        seen = [await registration.read() for _ in range(2)]

    assert seen == [before, before]
    assert [(each["event"], each["path"]) for each in logs] == [("registration.no_bookie", path)]


@in_virtual_time
async def test_without_any_other_name_the_bookies_are_unknown() -> None:
    cluster = await Cluster.start(B1)
    await cluster.kill(B1)
    await cluster.store.create(f"{ROOT}/available/{JUNK}", with_parents=True)

    with pytest.raises(UnavailableError, match="no bookie is registered at all"):
        await Registration(cluster.store, ROOT).read()


@in_virtual_time
async def test_a_cookie_that_cannot_be_a_bookies_makes_none_lost() -> None:
    cluster = await Cluster.start(B1, B2)
    registration = Registration(cluster.store, ROOT)
    path = f"{ROOT}/cookies/{JUNK}"
    await cluster.store.create(path, with_parents=True)

    with capture_logs() as logs:
        cookies = await registration.cookies()

    assert cookies.keys() == {B1, B2}
    assert [(each["event"], each["path"]) for each in logs] == [("registration.no_bookie", path)]


# --- The instance id of a cluster -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "known"),
    [
        pytest.param(b"3f2c-11\n", "3f2c-11", id="a UUID"),
        pytest.param(b"", None, id="nothing in it"),
        pytest.param(b"\xff", "�", id="no text: it is another cluster's all the same"),
    ],
)
def test_a_cluster_is_identified_by_its_instance_id(data: bytes, known: str | None) -> None:
    async def read() -> str | None:
        store = MemoryStore(MemoryTree())
        await store.create("/ledgers/INSTANCEID", data, with_parents=True)
        return await read_instance_id(store, "/ledgers")

    assert run(read()) == known


def test_a_cluster_without_an_instance_id_is_unknown() -> None:
    assert run(read_instance_id(MemoryStore(MemoryTree()), "/ledgers")) is None
