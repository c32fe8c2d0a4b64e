"""Requests and replies of protocol V2, compared with Java's."""

import pytest

from ledgers.errors import CorruptionError
from ledgers.wire import v2
from ledgers.wire.messages import (
    Add,
    ListEntries,
    Read,
    ReadBatch,
    ReadDiskSpace,
    ReadLac,
    Request,
    WriteLac,
)
from tests.vectors import Case, cases

KEY = bytes(20)
OPCODES = set(v2.Opcode)
FRAMES = [case for case in cases("frames_v2") if case["fields"]["operation"] in OPCODES]
# A batch read that fences is the one frame that we never send: fencing goes over V3 (rule S5).
REQUESTS = [
    case
    for case in FRAMES
    if case["direction"] == "request" and case["name"] != "batch read, no limits, fencing"
]
REPLIES = [case for case in FRAMES if case["direction"] == "reply"]


def request_of(fields: Case) -> Request:
    flags = fields["flags"]
    match fields["operation"]:
        case v2.Opcode.ADD:
            return Add(
                entry=bytes.fromhex(fields["entry"]),
                master_key=bytes.fromhex(fields["master_key"]),
                is_recovery=bool(flags & 2),
                is_high_priority=bool(flags & 4),
            )
        case v2.Opcode.READ:
            return Read(
                ledger_id=fields["ledger_id"],
                entry_id=fields["entry_id"],
                fencing_key=bytes.fromhex(fields["master_key"]) if flags & 1 else None,
                is_high_priority=bool(flags & 4),
            )
        case _:
            return ReadBatch(
                ledger_id=fields["ledger_id"],
                first_entry_id=fields["entry_id"],
                count_max=fields["max_count"],
                bytes_max=fields["max_size"],
            )


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case["name"])
def test_a_request_is_the_packet_that_java_sends(case: Case) -> None:
    fields = case["fields"]

    encoded = v2.encode(request_of(fields), fields.get("request_id", 0))

    assert encoded.packet == bytes.fromhex(case["frame"])[4:]


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: f"{case['name']} {case['fields']}"[:60])
def test_a_reply_says_what_the_bookie_meant(case: Case) -> None:
    fields = case["fields"]
    entries = fields.get("entries") or ([fields["entry"]] if "entry" in fields else [])

    reply = v2.decode(bytes.fromhex(case["frame"])[4:])

    assert reply.code == fields.get("code", 0)
    assert reply.entries == tuple(map(bytes.fromhex, entries))


@pytest.mark.parametrize(
    ("request_", "reply_frame"),
    [
        pytest.param(
            Read(ledger_id=1, entry_id=-1),
            "02020000 00000002 0000000000000001 ffffffffffffffff",
            id="a last-entry reply repeats -1",
        ),
        pytest.param(
            ReadBatch(ledger_id=1, first_entry_id=9, count_max=1, bytes_max=1),
            "02070000 00000002 0000000000000001 0000000000000009 0000000000000007",
            id="a batch reply repeats the request id",
        ),
    ],
)
def test_a_reply_is_assigned_to_its_request(request_: Request, reply_frame: str) -> None:
    encoded = v2.encode(request_, 7)

    reply = v2.decode(bytes.fromhex(reply_frame))

    assert reply.key == encoded.key


def test_only_batch_reads_have_distinct_replies() -> None:
    read = Read(ledger_id=1, entry_id=2)
    fencing_read = Read(ledger_id=1, entry_id=2, fencing_key=KEY)
    batch = ReadBatch(ledger_id=1, first_entry_id=2, count_max=1, bytes_max=1)

    assert v2.encode(read, 1).key == v2.encode(fencing_read, 2).key
    assert not v2.encode(read, 1).is_key_unique
    assert v2.encode(batch, 1).key != v2.encode(batch, 2).key
    assert v2.encode(batch, 1).is_key_unique


@pytest.mark.parametrize(
    "request_",
    [
        ReadLac(ledger_id=1),
        WriteLac(ledger_id=1, lac=0, master_key=KEY, record=bytes(20)),
        ListEntries(ledger_id=1),
        ReadDiskSpace(),
    ],
    ids=lambda request: type(request).__name__,
)
def test_requests_that_need_v3_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="needs the V3 protocol"):
        v2.encode(request_, 0)


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param("", id="nothing"),
        pytest.param("020200", id="a truncated header word"),
        pytest.param("01020000 00000000 0000000000000001 0000000000000000", id="another version"),
        pytest.param("02040000 00000000 0000000000000001 0000000000000000", id="no V2 operation"),
        pytest.param("02020000 00000002 0000000000000001 00000000000000", id="ids cut short"),
        pytest.param("02020000 00000000 0000000000000001 0000000000000000", id="good, no entry"),
        pytest.param("02020000 00000002 0000000000000001 0000000000000000 aa", id="no, and entry"),
        pytest.param("02010000 00000000 0000000000000001 0000000000000000 aa", id="add and entry"),
        pytest.param("02070000 00000000" + "00" * 24 + "0000", id="entry size cut short"),
        pytest.param("02070000 00000000" + "00" * 24 + "00000002 aa", id="entry cut short"),
        pytest.param("02070000 00000000" + "00" * 24 + "ffffffff", id="negative entry size"),
        pytest.param("02070000 00000000" + "00" * 24 + "fffffffc", id="entry size back to itself"),
        pytest.param("02070000 00000002" + "00" * 24 + "00000001 aa", id="no batch, and entry"),
        pytest.param("02030000 0a0178 1200", id="an auth message, which we never send"),
    ],
)
def test_a_malformed_reply_is_corruption(packet: str) -> None:
    with pytest.raises(CorruptionError):
        v2.decode(bytes.fromhex(packet))
