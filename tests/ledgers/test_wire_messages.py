"""Requests that would harm a bookie cannot be made, and status codes become errors."""

from collections.abc import Callable

import pytest

from ledgers.digest import HEADER
from ledgers.errors import (
    BookmenderError,
    BusyError,
    FencedError,
    NoSuchEntryError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.wire.messages import Add, Read, Reply, Request, Status

KEY = bytes(20)


def add(*, ledger_id: int = 1, entry_id: int = 0, size: int = HEADER.size, key: bytes = KEY) -> Add:
    return Add(entry=HEADER.pack(ledger_id, entry_id, -1, 0)[:size], master_key=key)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Read(ledger_id=1, entry_id=-2), id="read of a special entry"),
        pytest.param(lambda: Read(ledger_id=-1, entry_id=0), id="read of no ledger"),
        pytest.param(
            lambda: Read(ledger_id=1, entry_id=0, fencing_key=b""), id="empty fencing key"
        ),
        pytest.param(lambda: add(ledger_id=-1), id="add to no ledger"),
        pytest.param(lambda: add(entry_id=-1), id="add of a special entry"),
        pytest.param(lambda: add(size=31), id="add of less than a header"),
        pytest.param(lambda: add(key=KEY[1:]), id="add with a short key"),
    ],
)
def test_a_harmful_request_cannot_be_made(make: Callable[[], Request]) -> None:
    with pytest.raises(AssertionError):
        make()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Read(ledger_id=0, entry_id=-1), id="last entry of the first ledger"),
        pytest.param(lambda: Read(ledger_id=1, entry_id=0, fencing_key=KEY), id="fencing read"),
        pytest.param(add, id="an entry without digest or payload"),
    ],
)
def test_an_ordinary_request_can_be_made(make: Callable[[], Request]) -> None:
    assert make() == make()


# --- Status codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("v2_code", "v3_code", "name", "error"),
    [
        (0, 0, "EOK", None),
        (1, 402, "ENOLEDGER", NoSuchEntryError),
        (2, 403, "ENOENTRY", NoSuchEntryError),
        (100, 404, "EBADREQ", UnavailableError),
        (101, 501, "EIO", UnreadableError),
        (102, 502, "EUA", UnauthorizedError),
        (103, 503, "EBADVERSION", UnavailableError),
        (104, 504, "EFENCED", FencedError),
        (105, 505, "EREADONLY", ReadOnlyError),
        (106, 506, "ETOOMANYREQUESTS", BusyError),
        (107, 507, "EUNKNOWNLEDGERSTATE", UnavailableError),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("E") else "",
)
def test_a_code_means_one_error_in_both_protocols(
    v2_code: int, v3_code: int, name: str, error: type[BookmenderError] | None
) -> None:
    status = Status[name]

    assert Status.of_v2(v2_code) is status
    assert Status.of_v3(v3_code) is status
    assert status.error is error


@pytest.mark.parametrize("code", [-1, 3, 99, 108, 400, 401, 405, 500, 508, 2**31 - 1])
def test_an_unknown_code_proves_nothing(code: int) -> None:
    assert Status.of_v2(code) is Status.of_v3(code) is Status.UNKNOWN
    assert Status.UNKNOWN.error is UnavailableError


@pytest.mark.parametrize("code", [402, 501])
def test_the_codes_of_one_protocol_mean_nothing_in_the_other(code: int) -> None:
    assert Status.of_v2(code) is Status.UNKNOWN


def test_a_refusal_becomes_an_error_that_names_code_and_place() -> None:
    reply = Reply(key=(), status=Status.EFENCED, code=104)

    with pytest.raises(FencedError, match=r"EFENCED.*code=104, bookie=b1:3181"):
        reply.check(bookie="b1:3181")


def test_a_success_code_raises_no_error() -> None:
    reply = Reply(key=(), status=Status.EOK, code=0)

    assert reply.check() is reply
