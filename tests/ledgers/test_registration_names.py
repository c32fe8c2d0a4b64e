"""Names beside the bookies' znodes that cannot be a bookie's: they are ignored and logged."""

import pytest
from structlog.testing import capture_logs

from ledgers.errors import UnavailableError
from ledgers.registration import Registration
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import ROOT

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
