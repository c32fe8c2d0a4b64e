"""Conditions of rule W that random histories break too rarely."""

from __future__ import annotations

from notifications.client_state import ClientState, StoredState
from notifications.matcher import Matcher
from notifications.protocol import LEDGER, OBJECT, Change, Changes, Welcome
from notifications.versions import VersionTable

KEY = "Oa"


def told(matcher: Matcher, client: ClientState) -> Change | None:
    """Connect the client to a server, and return what it is told of the object."""
    session = matcher.open(client.connected(0.0), 0.0)
    for _ in range(3):
        for said in session.tick(0.0):
            client.receive(said, 0.0)
        for frame in client.frames(0.0):
            session.receive(frame, 0.0)
    item = client.next_item()
    return item if isinstance(item, Change) else None


def server(deletion: Change, *, position: int) -> Matcher:
    """Return a server that knew the object at 40, and then learned that it is deleted."""
    table = VersionTable(OBJECT, position=40, horizon=10)
    table.apply([Change(KEY, 40)], position=40)
    table.apply([deletion], position=position)
    return Matcher(server="s", feed="f", tables=[table])


def client(stored: StoredState | None = None, *, known: int = 0) -> ClientState:
    client = ClientState(client="c", stored=stored, now_s=0.0)
    client.register(KEY, known)
    return client


def test_a_missed_deletion_is_told_again_by_a_server_that_did_not_miss_it() -> None:
    """The client crashes before it has finished. It was deleted at 50, and the first server learned
    of that at 100."""
    crashed = client(known=40)

    first = told(server(Change(KEY, None, True), position=100), crashed)
    stored = crashed.stored()
    second = told(server(Change(KEY, 50, True), position=100), client(stored, known=40))

    assert first == Change(KEY, None, True)
    assert stored is not None
    assert second == Change(KEY, 50, True)


def test_a_missed_deletion_is_news_to_a_client_that_knows_a_later_version() -> None:
    """The object was deleted at 50. The client knows it at 45, by another server."""
    assert told(server(Change(KEY, None, True), position=100), client(known=45)) is not None


def test_a_missed_deletion_is_no_news_to_a_client_that_knows_the_position() -> None:
    assert told(server(Change(KEY, None, True), position=100), client(known=100)) is None


def test_a_later_change_has_its_version_again() -> None:
    missed = server(Change(KEY, None, True), position=100)
    missed.apply(OBJECT, [Change(KEY, 120)], position=120, now_s=0.0)

    assert told(missed, client()) == Change(KEY, 120)


def test_an_answer_before_the_server_knows_the_registrations_moves_no_positions() -> None:
    """A server beats before it has read the registrations. If the connection is lost then, its
    positions must not count for them."""
    mine = client()
    told(server(Change(KEY, 50), position=50), mine)
    mine.connected(0.0)
    mine.receive(Welcome(server="s", feed="f"), 0.0)
    mine.frames(0.0)

    mine.receive(Changes(positions={OBJECT: 60}, n=0), 0.0)

    assert mine.positions == {OBJECT: 50}


def test_the_answer_to_all_registrations_moves_the_positions() -> None:
    mine = client()
    told(server(Change(KEY, 50), position=50), mine)

    mine.receive(Changes(positions={OBJECT: 60}, n=1), 0.0)

    assert mine.positions == {OBJECT: 60}


def test_tables_that_were_read_again_do_not_prove_that_the_feed_is_fresh() -> None:
    """The log of the feed can be read while nobody writes it."""
    matcher = server(Change(KEY, 50), position=50)
    matcher.heard_s = {LEDGER: 10.0, OBJECT: 10.0}
    tables = [VersionTable(LEDGER, position=50), VersionTable(OBJECT, position=50)]

    matcher.load("f", tables, now_s=100.0)

    assert matcher.age_s(100.0) == 90.0


def test_a_checkpoint_proves_that_the_feed_is_fresh() -> None:
    matcher = server(Change(KEY, 50), position=50)
    tables = [VersionTable(LEDGER, position=50), VersionTable(OBJECT, position=50)]
    matcher.load("f", tables, now_s=100.0)

    matcher.apply(LEDGER, [], position=60, now_s=100.0)

    assert matcher.age_s(100.0) == 0.0
