"""Bookies with denied access to their registrations or cookies, such as one with other
credentials."""

import asyncio

import pytest
from structlog.testing import capture_logs

from auditor.underreplication import reformatted_bookies
from ledgers.registration import Registration
from replication.cluster import ViewSource
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import ROOT


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
