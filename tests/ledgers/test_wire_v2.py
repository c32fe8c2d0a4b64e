"""Adds and their replies in protocol V2, compared with Java's."""

import pytest

from ledgers.errors import CorruptionError
from ledgers.wire import v2
from ledgers.wire.messages import Add, Read, ReadDiskSpace, ReadLac, Request
from tests.vectors import Case, cases

FRAMES = [case for case in cases("frames_v2") if case["fields"]["operation"] == v2.ADD]
REQUESTS = [case for case in FRAMES if case["direction"] == "request"]
REPLIES = [case for case in FRAMES if case["direction"] == "reply"]


def add_of(fields: Case) -> Add:
    return Add(
        entry=bytes.fromhex(fields["entry"]),
        master_key=bytes.fromhex(fields["master_key"]),
        is_recovery=bool(fields["flags"] & 2),
        is_high_priority=bool(fields["flags"] & 4),
    )


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case["name"])
def test_a_request_is_the_packet_that_java_sends(case: Case) -> None:
    encoded = v2.encode(add_of(case["fields"]), 7)

    assert encoded.packet == bytes.fromhex(case["frame"])[4:]
    assert not encoded.is_key_unique


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: f"{case['name']} {case['fields']}"[:60])
def test_a_reply_says_what_the_bookie_meant(case: Case) -> None:
    fields = case["fields"]

    reply = v2.decode(bytes.fromhex(case["frame"])[4:])

    assert reply.code == fields.get("code", 0)
    assert reply.key == (fields["ledger_id"], fields["entry_id"])


@pytest.mark.parametrize(
    "request_",
    [Read(ledger_id=1, entry_id=0), ReadLac(ledger_id=1), ReadDiskSpace()],
    ids=lambda request: type(request).__name__,
)
def test_requests_that_need_v3_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="needs the V3 protocol"):
        v2.encode(request_, 0)


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param("", id="nothing"),
        pytest.param("020100", id="a truncated header word"),
        pytest.param("01010000 00000000 0000000000000001 0000000000000000", id="another version"),
        pytest.param("02040000 00000000 0000000000000001 0000000000000000", id="no V2 operation"),
        pytest.param("02020000 00000002 0000000000000001 0000000000000000", id="a reply to a read"),
        pytest.param("02010000 00000002 0000000000000001 00000000000000", id="ids cut short"),
        pytest.param("02010000 00000000 0000000000000001 0000000000000000 aa", id="add and entry"),
    ],
)
def test_a_malformed_reply_is_corruption(packet: str) -> None:
    with pytest.raises(CorruptionError):
        v2.decode(bytes.fromhex(packet))
