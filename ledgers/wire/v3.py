"""The V3 protocol: one protobuf message in each packet, matched by transaction id and operation.

The only protocol with LAC reads. Every reply names its
request, so fencing, recovery and LAC reads use this protocol (rule S5). The order of fields does
not matter: BookKeeper 4.18 writes ``flag`` first, older versions write it last. START_TLS and AUTH,
which come before all other requests, are at the end of this file.
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ledgers.bookies import DiskSpace, LacAnswer
from ledgers.errors import CorruptionError
from ledgers.wire import bookkeeper_wire_pb2 as wire
from ledgers.wire.messages import Add, Encoded, Read, ReadDiskSpace, ReadLac, Reply, Request, Status

HIGH_PRIORITY = 100
"""Any value above 0 has the same effect. Java's client sends this one."""

_ROOM_FLAGS = (
    wire.GetBookieInfoRequest.TOTAL_DISK_CAPACITY | wire.GetBookieInfoRequest.FREE_DISK_SPACE
)


def encode(request: Request, request_id: int) -> Encoded:
    """Encode a request."""
    message = wire.Request()
    message.header.version = wire.VERSION_THREE
    message.header.operation = _fill(message, request)
    message.header.txnId = request_id
    if isinstance(request, Read | Add) and request.is_high_priority:
        message.header.priority = HIGH_PRIORITY
    return Encoded(
        key=(message.header.operation, request_id),
        packet=message.SerializeToString(),
        is_key_unique=True,
    )


def decode(packet: bytes) -> Reply:
    """Decode a reply. Raises CorruptionError."""
    response = _parse(packet)
    code = _code(response)
    status, lac, entry = Status.of_v3(code), response.readLacResponse, b""
    if status is Status.EOK and response.header.operation == wire.READ_ENTRY:
        if not response.readResponse.HasField("body"):
            raise CorruptionError("good reply to a read, without an entry")
        entry = response.readResponse.body
    return Reply(
        key=(response.header.operation, response.header.txnId),
        status=status,
        code=code,
        entry=entry,
        # Both fields with any status, because an error may concern only one of them.
        lac=LacAnswer(
            lac_record=lac.lacBody if lac.HasField("lacBody") else None,
            last_entry=lac.lastEntryBody if lac.HasField("lastEntryBody") else None,
        ),
        room=_room(response) if status is Status.EOK else None,
    )


# --- Requests ----------------------------------------------------------------------------------


def _fill(message: wire.Request, request: Request) -> int:
    """Set the inner message of the request, and return its operation."""
    match request:
        case Read():
            read = message.readRequest
            read.ledgerId, read.entryId = request.ledger_id, request.entry_id
            if request.fencing_key is not None:
                read.flag = wire.ReadRequest.FENCE_LEDGER
                read.masterKey = request.fencing_key
            return wire.READ_ENTRY
        case Add(header=header):
            add = message.addRequest
            add.ledgerId, add.entryId = header.ledger_id, header.entry_id
            add.masterKey, add.body = request.master_key, request.entry
            if request.is_recovery:
                add.flag = wire.AddRequest.RECOVERY_ADD
            return wire.ADD_ENTRY
        case ReadLac():
            message.readLacRequest.ledgerId = request.ledger_id
            return wire.READ_LAC
        case ReadDiskSpace():
            message.getBookieInfoRequest.requested = _ROOM_FLAGS
            return wire.GET_BOOKIE_INFO


# --- Replies -----------------------------------------------------------------------------------


def _parse(packet: bytes) -> wire.Response:
    try:
        response = wire.Response.FromString(packet)
    except DecodeError as error:
        raise CorruptionError("unreadable V3 reply", packet_bytes=len(packet)) from error
    if not response.IsInitialized():  # the parser accepts missing required fields
        raise CorruptionError("V3 reply without a required field", packet_bytes=len(packet))
    return response


def _code(response: wire.Response) -> int:
    """Return the outer status if it is an error, else the status of the inner message, if any."""
    if response.status != Status.EOK.v3_code:
        return response.status
    for inner in (
        response.readResponse,
        response.addResponse,
        response.readLacResponse,
        response.getBookieInfoResponse,
    ):
        if inner.status != Status.EOK.v3_code:  # 0 as well where the message is absent
            return inner.status
    return response.status


def _room(response: wire.Response) -> DiskSpace | None:
    """Return the disk space; None if the sizes are missing or impossible."""
    if response.header.operation != wire.GET_BOOKIE_INFO:
        return None
    inner = response.getBookieInfoResponse
    if not 0 <= inner.freeDiskSpace <= inner.totalDiskCapacity or not inner.totalDiskCapacity:
        return None  # not an error that should break a connection with other requests
    return DiskSpace(free_bytes=inner.freeDiskSpace, total_bytes=inner.totalDiskCapacity)


# --- Before other requests: TLS and authentication ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTls:
    """Request to continue with TLS on this connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """A message of the client's authentication plugin to the same plugin of the bookie."""

    plugin: str
    payload: bytes


Handshake = StartTls | Auth


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeReply:
    """The reply to a StartTls or Auth. ``plugin``, ``payload``: the bookie's message, if any."""

    request_id: int
    status: Status
    plugin: str
    payload: bytes


def encode_handshake(request: Handshake, request_id: int) -> bytes:
    message = wire.Request()
    message.header.version = wire.VERSION_THREE
    message.header.txnId = request_id
    match request:
        case StartTls():
            message.header.operation = wire.START_TLS
            message.startTLSRequest.SetInParent()
        case Auth():
            message.header.operation = wire.AUTH
            message.authRequest.authPluginName = request.plugin
            message.authRequest.payload = request.payload
    return message.SerializeToString()


def decode_handshake(packet: bytes) -> HandshakeReply:
    """Decode a reply. Raises CorruptionError."""
    response = _parse(packet)
    return HandshakeReply(
        request_id=response.header.txnId,
        status=Status.of_v3(response.status),
        plugin=response.authResponse.authPluginName,
        payload=response.authResponse.payload,
    )
