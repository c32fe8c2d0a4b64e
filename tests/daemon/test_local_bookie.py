"""Finds the bookie that runs on this host."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

import daemon.local_bookie
from daemon.local_bookie import own_addresses
from ledgers.codec.registration import Address
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.store import Stat
from replication.cluster import ClusterView


def local_bookie(configured: str, found: ClusterView) -> BookieId | None:
    return asyncio.run(daemon.local_bookie.local_bookie(configured, found))


def view(
    read_only: tuple[str, ...] = (), *, away: tuple[str, ...] = (), **hosts: str | None
) -> ClusterView:
    """Return a view of bookies by name, with the host of each, and of some absent bookies."""

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
def test_the_only_bookie_with_an_address_of_this_host_is_local(host: str) -> None:
    found = local_bookie("", view(a="bookie-a.example", b=host))

    assert found == "b"


def test_absent_bookies_on_other_hosts_do_not_matter() -> None:
    assert local_bookie("", view(away=("10.9.9.9:3181", "opaque"), b="127.0.0.1")) == "b"


def test_a_read_only_bookie_can_be_local() -> None:
    assert local_bookie("", view(("b",), a="bookie-a.example", b="127.0.0.1")) == "b"


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(view(), id="no bookie at all"),
        pytest.param(view(a="bookie-a.example"), id="none here"),
        pytest.param(view(a="127.0.0.1", b="localhost"), id="two here"),
        pytest.param(view(a=None), id="one without a host"),
        pytest.param(
            view(away=("127.0.0.1:3182",), a="127.0.0.1"), id="another one here is absent"
        ),
    ],
)
def test_an_ambiguous_or_unknown_host_means_no_local_bookie(found: ClusterView) -> None:
    assert local_bookie("", found) is None


def test_the_bookie_named_in_the_settings_is_local() -> None:
    assert local_bookie("b", view(a="127.0.0.1", b="127.0.0.1")) == "b"
    assert local_bookie("away:3181", view(a="127.0.0.1")) == "away:3181"


def test_a_host_whose_name_does_not_resolve_has_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)

    assert {"localhost", "127.0.0.1", socket.gethostname()} <= asyncio.run(own_addresses())


@pytest.fixture
def dead_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The system's resolver answers only once the yielded event is set."""
    answers = threading.Event()

    def hang(*args: object, **options: object) -> None:
        answers.wait(60)
        raise socket.gaierror("no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    yield answers
    answers.set()


def test_a_resolver_that_does_not_answer_delays_no_start(
    dead_resolver: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.local_bookie.LOOKUP_MAX_S", 0.01)

    assert local_bookie("", view(a="127.0.0.1")) == "a"
    assert not dead_resolver.is_set()
