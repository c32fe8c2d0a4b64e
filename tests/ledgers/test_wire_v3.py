"""Requests and replies of protocol V3, compared with Java's."""

import pytest

from ledgers.bookies import DiskSpace, LacAnswer
from ledgers.errors import CorruptionError
from ledgers.wire import bookkeeper_wire_pb2 as wire
from ledgers.wire import v3
from ledgers.wire.messages import Add, Read, ReadDiskSpace, ReadLac, Request, Status
from tests.vectors import Case, cases

OPERATIONS = set(wire.OperationType.values()) - {wire.GET_LIST_OF_ENTRIES_OF_LEDGER, wire.WRITE_LAC}
UNUSED_REQUESTS = {"long poll", "add, deferred sync"}
HANDSHAKES = {wire.AUTH, wire.START_TLS}
FRAMES = [case for case in cases("frames_v3") if case["fields"]["operation"] in OPERATIONS]
REQUESTS = [
    case
    for case in FRAMES
    if case["direction"] == "request"
    and case["name"] not in UNUSED_REQUESTS
    and case["fields"]["operation"] not in HANDSHAKES
]
REPLIES = [
    case
    for case in FRAMES
    if case["direction"] == "reply" and case["fields"]["operation"] not in HANDSHAKES
]
HANDSHAKE_FRAMES = [case for case in FRAMES if case["fields"]["operation"] in HANDSHAKES]


def request_of(fields: Case) -> Request:
    ledger_id = fields.get("ledger_id", 0)
    master_key = bytes.fromhex(fields.get("master_key", ""))
    is_flagged, is_high_priority = "flag" in fields, fields["priority"] > 0
    match fields["operation"]:
        case wire.READ_ENTRY:
            return Read(
                ledger_id=ledger_id,
                entry_id=fields["entry_id"],
                fencing_key=master_key if is_flagged else None,
                is_high_priority=is_high_priority,
            )
        case wire.ADD_ENTRY:
            return Add(
                entry=bytes.fromhex(fields["body"]),
                master_key=master_key,
                is_recovery=is_flagged,
                is_high_priority=is_high_priority,
            )
        case wire.READ_LAC:
            return ReadLac(ledger_id=ledger_id)
        case _:
            return ReadDiskSpace()


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case["name"])
def test_a_request_has_the_fields_of_javas(case: Case) -> None:
    """The test compares fields, not bytes: Java's order of fields differs between its versions."""
    fields = case["fields"]

    encoded = v3.encode(request_of(fields), fields["txn_id"])

    ours, javas = wire.Request.FromString(encoded.packet), bytes.fromhex(case["frame"])[4:]
    assert ours == wire.Request.FromString(javas)
    assert len(encoded.packet) == len(javas)


@pytest.mark.parametrize("case", HANDSHAKE_FRAMES, ids=lambda case: case["name"])
def test_a_handshake_has_the_fields_of_javas(case: Case) -> None:
    fields, packet = case["fields"], bytes.fromhex(case["frame"])[4:]
    plugin = fields.get("auth_plugin_name", "")
    payload = bytes.fromhex(fields.get("payload", ""))
    if case["direction"] == "request":
        is_auth = fields["operation"] == wire.AUTH
        request = v3.Auth(plugin=plugin, payload=payload) if is_auth else v3.StartTls()
        ours = v3.encode_handshake(request, fields["txn_id"])
        assert wire.Request.FromString(ours) == wire.Request.FromString(packet)
    else:
        reply = v3.decode_handshake(packet)
        assert (reply.request_id, reply.plugin) == (fields["txn_id"], plugin)
        assert (reply.payload, reply.status) == (payload, Status.of_v3(fields["status"]))


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: f"{case['name']} {case['fields']}"[:60])
def test_a_reply_says_what_the_bookie_meant(case: Case) -> None:
    fields = case["fields"]

    reply = v3.decode(bytes.fromhex(case["frame"])[4:])

    assert reply.key == (fields["operation"], fields["txn_id"])
    assert reply.code == fields["status"]
    assert reply.entry == bytes.fromhex(fields.get("body", ""))
    assert reply.lac == LacAnswer(
        lac_record=bytes.fromhex(fields["lac_body"]) if "lac_body" in fields else None,
        last_entry=bytes.fromhex(fields["last_entry_body"])
        if "last_entry_body" in fields
        else None,
    )
    assert reply.room == (
        DiskSpace(free_bytes=fields["free_disk_space"], total_bytes=fields["total_disk_capacity"])
        if "free_disk_space" in fields
        else None
    )


def test_a_reply_is_assigned_to_its_request() -> None:
    encoded = v3.encode(Read(ledger_id=1, entry_id=0), 42)

    reply = v3.decode(bytes.fromhex("0a0608031001182a 109303 a20607 089303 1001 1800"))

    assert reply.key == encoded.key
    assert encoded.is_key_unique


@pytest.mark.parametrize(
    ("free_bytes", "total_bytes"),
    [
        pytest.param(2, 1, id="more free than there is"),
        pytest.param(-1, 1, id="less than nothing free"),
        pytest.param(0, 0, id="no disks at all"),
    ],
)
def test_impossible_disk_sizes_are_ignored_without_a_break(
    free_bytes: int, total_bytes: int
) -> None:
    """The connection continues."""
    message = wire.Response(
        header=wire.BKPacketHeader(
            version=wire.VERSION_THREE, operation=wire.GET_BOOKIE_INFO, txnId=1
        ),
        status=0,
        getBookieInfoResponse=wire.GetBookieInfoResponse(
            status=0, freeDiskSpace=free_bytes, totalDiskCapacity=total_bytes
        ),
    )

    reply = v3.decode(message.SerializeToString())

    assert reply.status is Status.EOK
    assert reply.room is None


def response(outer: int, *, inner: int | None = None) -> bytes:
    """Return a reply to a read with these status codes."""
    header = wire.BKPacketHeader(version=wire.VERSION_THREE, operation=wire.READ_ENTRY, txnId=1)
    message = wire.Response(header=header, status=outer)
    if inner is not None:
        message.readResponse.CopyFrom(wire.ReadResponse(status=inner, ledgerId=1, entryId=0))
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("packet", "status"),
    [
        pytest.param(
            response(0, inner=503), Status.EBADVERSION, id="the inner status if it is an error"
        ),
        pytest.param(response(502, inner=0), Status.EUA, id="the outer status if it is an error"),
        pytest.param(response(502), Status.EUA, id="without an inner message"),
        pytest.param(response(0, inner=599), Status.UNKNOWN, id="a code of the future, inside"),
        pytest.param(response(-7), Status.UNKNOWN, id="a code of the future, outside"),
    ],
)
def test_which_of_two_statuses_counts(packet: bytes, status: Status) -> None:
    assert v3.decode(packet).status is status


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff" * 12, id="no message"),
        pytest.param(bytes.fromhex("0a06080310011801"), id="without a status"),
        pytest.param(bytes.fromhex("1000"), id="without a header"),
        pytest.param(response(0), id="good, without an inner message"),
        pytest.param(response(0, inner=0), id="good, without an entry"),
    ],
)
def test_a_malformed_reply_is_corruption(packet: bytes) -> None:
    with pytest.raises(CorruptionError):
        v3.decode(packet)
