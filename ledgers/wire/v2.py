"""The V2 protocol: fixed binary layouts, big-endian. The only protocol with batch reads.

A packet starts with a header word: protocol version (8 bits), opcode (8), flags (16). There is no
transaction id. A reply repeats the ledger and entry id of its request, so the replies to two equal
requests cannot be told apart (rule S5); only batch reads have an id. Numbers are BookieProtocol's.
"""

import struct
from dataclasses import replace
from enum import IntEnum

from ledgers.errors import CorruptionError
from ledgers.wire.messages import Add, Encoded, Read, ReadBatch, Reply, Request, Status

VERSION = 2

FLAG_FENCE = 1
FLAG_RECOVERY_ADD = 2
FLAG_HIGH_PRIORITY = 4


class Opcode(IntEnum):
    """The opcodes of our requests. A bookie closes the connection when it receives an unknown
    one."""

    ADD = 1
    READ = 2
    READ_BATCH = 7
    """Since 4.17; an older bookie closes the connection."""


_HEADER_WORD = struct.Struct(">BBH")
_READ = struct.Struct(">BBHqq")
_READ_BATCH = struct.Struct(">BBHqqqiq")
_REPLY = struct.Struct(">BBHiqq")
_BATCH_REPLY = struct.Struct(">BBHiqqq")
_ENTRY_SIZE = struct.Struct(">i")


def encode(request: Request, request_id: int) -> Encoded:
    """Encode a request. Raises ValueError if V2 has no such request."""
    match request:
        case Add():
            return _encode_add(request)
        case Read():
            return _encode_read(request)
        case ReadBatch():
            return _encode_batch(request, request_id)
    raise ValueError(f"{type(request).__name__} needs the V3 protocol")


def decode(packet: bytes) -> Reply:
    """Decode a reply. Raises CorruptionError."""
    version, opcode, _ = _unpack(_HEADER_WORD, packet)
    if version != VERSION:
        raise CorruptionError("not a V2 packet", version=version)
    match opcode:
        case Opcode.ADD | Opcode.READ:
            return _decode_add_or_read(packet)
        case Opcode.READ_BATCH:
            return _decode_batch(packet)
    raise CorruptionError("no such operation in V2", operation=opcode)


# --- Requests ----------------------------------------------------------------------------------


def _encode_add(request: Add) -> Encoded:
    header = request.header
    flags = FLAG_RECOVERY_ADD if request.is_recovery else 0
    flags |= FLAG_HIGH_PRIORITY if request.is_high_priority else 0
    word = _HEADER_WORD.pack(VERSION, Opcode.ADD, flags)
    return Encoded(
        key=(Opcode.ADD, header.ledger_id, header.entry_id),
        packet=b"".join((word, request.master_key, request.entry)),
        is_key_unique=False,
    )


def _encode_read(request: Read) -> Encoded:
    flags = FLAG_FENCE if request.fencing_key is not None else 0
    flags |= FLAG_HIGH_PRIORITY if request.is_high_priority else 0
    head = _READ.pack(VERSION, Opcode.READ, flags, request.ledger_id, request.entry_id)
    return Encoded(
        key=(Opcode.READ, request.ledger_id, request.entry_id),
        packet=head + (request.fencing_key or b""),
        is_key_unique=False,
    )


def _encode_batch(request: ReadBatch, request_id: int) -> Encoded:
    packet = _READ_BATCH.pack(
        VERSION,
        Opcode.READ_BATCH,
        0,
        request.ledger_id,
        request.first_entry_id,
        request_id,
        request.count_max,
        request.bytes_max,
    )
    return Encoded(key=(Opcode.READ_BATCH, request_id), packet=packet, is_key_unique=True)


# --- Replies -----------------------------------------------------------------------------------


def _decode_add_or_read(packet: bytes) -> Reply:
    _, opcode, _, code, ledger_id, entry_id = _unpack(_REPLY, packet)
    reply = Reply(key=(Opcode(opcode), ledger_id, entry_id), status=Status.of_v2(code), code=code)
    entry = packet[_REPLY.size :]
    has_entry = opcode == Opcode.READ and reply.status is Status.EOK
    if has_entry != bool(entry):
        raise CorruptionError("V2 reply of the wrong length", packet_bytes=len(packet), code=code)
    return replace(reply, entries=(entry,)) if has_entry else reply


def _decode_batch(packet: bytes) -> Reply:
    _, _, _, code, _, _, request_id = _unpack(_BATCH_REPLY, packet)
    reply = Reply(key=(Opcode.READ_BATCH, request_id), status=Status.of_v2(code), code=code)
    entries = tuple(_entries_of_batch(packet))
    if entries and reply.status is not Status.EOK:
        raise CorruptionError("V2 reply of the wrong length", packet_bytes=len(packet), code=code)
    return replace(reply, entries=entries)


def _entries_of_batch(packet: bytes) -> list[bytes]:
    entries, position = [], _BATCH_REPLY.size
    while position < len(packet):
        (entry_bytes,) = _unpack(_ENTRY_SIZE, packet, position)
        start = position + _ENTRY_SIZE.size
        position = start + entry_bytes
        if entry_bytes < 0 or position > len(packet):
            raise CorruptionError("entry size out of bounds", entry_bytes=entry_bytes)
        entries.append(packet[start:position])
    return entries


def _unpack(layout: struct.Struct, packet: bytes, position: int = 0) -> tuple[int, ...]:
    if position + layout.size > len(packet):
        raise CorruptionError("V2 packet is cut short", packet_bytes=len(packet))
    return layout.unpack_from(packet, position)
