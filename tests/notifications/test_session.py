"""One client, as its server sees it."""

import pytest

import notifications.session
from notifications.matcher import Matcher
from notifications.protocol import Goodbye, Hello, Register, Welcome
from notifications.versions import VersionTable


def test_registrations_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that says to be far ahead of the server makes it wait."""
    monkeypatch.setattr(notifications.session, "HELD_MAX", 10)
    tables = [VersionTable(kind, position=1) for kind in "LBO"]
    session = Matcher(server="s", feed="f:1", tables=tables).open(Hello(client="c"), now_s=0.0)
    assert [type(frame) for frame in session.tick(0.0)] == [Welcome]

    for n in range(1, 7):
        session.receive(Register(n=n, add=[(f"L{n}", 1 << 40)]), 0.0)

    assert session.tick(0.0) == [Goodbye(code="protocol", text="too many registrations wait")]
