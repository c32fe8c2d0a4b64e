"""Status codes of both protocols, and the errors that they become."""

import pytest

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
from ledgers.wire.messages import Reply, Status


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
