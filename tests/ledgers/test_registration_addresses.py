"""Finds the bookie that answers at an address, from the registrations alone."""

import pytest

from ledgers.codec.registration import Address
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie

OLD, NEW, NAMED = BookieId("a:3181"), BookieId("newcomer"), BookieId("bk-old")
PLACE, ELSEWHERE = Address("a", 3181), Address("b", 3181)


def registered(
    bookie: BookieId, czxid: int, address: Address = PLACE, *hosts: str
) -> RegisteredBookie:
    """Return a bookie whose host resolves to ``hosts``."""
    return RegisteredBookie(
        bookie_id=bookie,
        address=address,
        czxid=czxid,
        is_writable=True,
        endpoints=frozenset(Address(host, address.port) for host in hosts),
    )


def view(*bookies: RegisteredBookie) -> BookieView:
    return BookieView(writable={each.bookie_id: each for each in bookies})


@pytest.mark.parametrize(
    ("bookies", "asked", "last", "expected"),
    [
        pytest.param([registered(OLD, 1)], OLD, None, PLACE, id="registered"),
        pytest.param([registered(NAMED, 1)], NAMED, None, PLACE, id="its id is no address"),
        pytest.param([], OLD, None, PLACE, id="absent, and never seen: by its id"),
        pytest.param(
            [], NAMED, registered(NAMED, 1, ELSEWHERE), ELSEWHERE, id="absent: where it was last"
        ),
        pytest.param([], NAMED, None, None, id="absent, and no address is known"),
        pytest.param([registered(NEW, 2)], OLD, None, None, id="another bookie has its address"),
        pytest.param(
            [registered(NEW, 2)],
            NAMED,
            registered(NAMED, 1),
            None,
            id="another bookie has its last known address",
        ),
        pytest.param(
            [registered(OLD, 1), registered(NEW, 2)],
            OLD,
            None,
            None,
            id="its session is not over yet",
        ),
        pytest.param(
            [registered(OLD, 1), registered(NEW, 2)],
            NEW,
            None,
            PLACE,
            id="the later bookie answers",
        ),
        pytest.param(
            [registered(OLD, 0), registered(NEW, 2)],
            NEW,
            None,
            None,
            id="denied access hides which one came later",
        ),
        pytest.param(
            [registered(OLD, 1), registered(NEW, 2, ELSEWHERE, "10.0.0.1", "10.0.0.2")],
            OLD,
            None,
            PLACE,
            id="its host resolves to other addresses",
        ),
        pytest.param(
            [registered(OLD, 1, PLACE, "10.0.0.1"), registered(NEW, 2, ELSEWHERE, "10.0.0.1")],
            OLD,
            None,
            None,
            id="the later bookie spells the same host differently",
        ),
        pytest.param(
            [registered(NEW, 2, ELSEWHERE, "10.0.0.1")],
            OLD,
            registered(OLD, 1, PLACE, "10.0.0.1"),
            None,
            id="absent, and another bookie has its address in another spelling",
        ),
        pytest.param(
            [registered(NEW, 2, ELSEWHERE)], OLD, None, PLACE, id="the other bookie is elsewhere"
        ),
    ],
)
def test_an_id_resolves_only_if_no_other_bookie_has_its_address(
    bookies: list[RegisteredBookie],
    asked: BookieId,
    last: RegisteredBookie | None,
    expected: Address | None,
) -> None:
    shown = view(*bookies)

    if expected is None:
        with pytest.raises(UnavailableError):
            shown.locate(asked, last=last)
    else:
        assert shown.locate(asked, last=last) == expected


def test_the_error_names_the_bookie_that_has_the_address() -> None:
    with pytest.raises(UnavailableError, match="another bookie is registered at its address: newc"):
        view(registered(NEW, 2)).locate(OLD)


def test_a_superseded_bookie_is_the_one_that_registered_earlier() -> None:
    assert view(registered(OLD, 1), registered(NEW, 2)).superseded == {OLD}


def test_a_single_bookie_answers_at_its_address_although_an_acl_hides_it() -> None:
    assert view(registered(OLD, 0)).locate(OLD) == PLACE
