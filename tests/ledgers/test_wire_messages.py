"""Requests that would harm a bookie, or never get a reply, cannot be made."""

from collections.abc import Callable

import pytest

from ledgers.digest import HEADER
from ledgers.wire.messages import Add, Read, Request

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
