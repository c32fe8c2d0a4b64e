"""Which bookie stands on this host."""

import socket

import pytest

from daemon.local_bookie import local_bookie, own_addresses
from ledgers.codec.registration import Address
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.store import Stat
from replication.cluster import ClusterView


def view(
    read_only: tuple[str, ...] = (), *, away: tuple[str, ...] = (), **hosts: str | None
) -> ClusterView:
    """Bookies by name, with the host that each is registered with; and the ids of some that are
    away."""

    def registered(name: str) -> RegisteredBookie:
        host = hosts[name]
        return RegisteredBookie(
            bookie_id=BookieId(name),
            address=None if host is None else Address(host, 3181),
            czxid=1,
            is_writable=name not in read_only,
        )

    return ClusterView(
        bookies=BookieView(
            writable={BookieId(name): registered(name) for name in hosts if name not in read_only},
            read_only={BookieId(name): registered(name) for name in read_only},
        ),
        cookies={BookieId(name): Stat(version=0) for name in (*hosts, *away)},
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", socket.gethostname()])
def test_the_only_bookie_registered_with_an_address_of_this_host_is_ours(host: str) -> None:
    found = local_bookie("", view(a="bookie-a.example", b=host))

    assert found == "b"


def test_bookies_that_are_away_elsewhere_change_nothing() -> None:
    assert local_bookie("", view(away=("10.9.9.9:3181", "opaque"), b="127.0.0.1")) == "b"


def test_a_read_only_one_is_ours_too() -> None:
    assert local_bookie("", view(("b",), a="bookie-a.example", b="127.0.0.1")) == "b"


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(view(), id="no bookie at all"),
        pytest.param(view(a="bookie-a.example"), id="none here"),
        pytest.param(view(a="127.0.0.1", b="localhost"), id="two here: which one is it?"),
        pytest.param(view(a=None), id="one that does not say where it is"),
        pytest.param(
            view(away=("127.0.0.1:3182",), a="127.0.0.1"), id="another one is not back yet"
        ),
    ],
)
def test_otherwise_there_is_none(found: ClusterView) -> None:
    assert local_bookie("", found) is None


def test_the_one_that_the_settings_name_is_believed() -> None:
    assert local_bookie("b", view(a="127.0.0.1", b="127.0.0.1")) == "b"
    assert local_bookie("away:3181", view(a="127.0.0.1")) == "away:3181"


def test_a_host_that_cannot_resolve_its_own_name_still_knows_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)

    assert {"localhost", "127.0.0.1", socket.gethostname()} <= own_addresses()
