"""The V2 protocol, as far as ``client`` needs it: adds of the largest entries.

A packet starts with a header word: protocol version (8 bits), opcode (8), flags (16). All numbers
are big-endian, and are BookieProtocol's. There is no transaction id: a reply repeats the ledger and
entry id, so the replies to two adds of the same entry cannot be told apart (rule S5).

The bulk path has its own V2 frames (``bulk/frames``).
"""

import struct

from ledgers.errors import CorruptionError
from ledgers.wire.messages import Add, Encoded, Reply, Request, Status

VERSION = 2
ADD = 1
FLAG_RECOVERY_ADD = 2
FLAG_HIGH_PRIORITY = 4

_HEADER_WORD = struct.Struct(">BBH")
_REPLY = struct.Struct(">BBHiqq")


def encode(request: Request, request_id: int) -> Encoded:
    """Encode an add. Raises ValueError for any other request."""
    if not isinstance(request, Add):
        raise ValueError(f"{type(request).__name__} needs the V3 protocol")
    header = request.header
    flags = FLAG_RECOVERY_ADD if request.is_recovery else 0
    flags |= FLAG_HIGH_PRIORITY if request.is_high_priority else 0
    word = _HEADER_WORD.pack(VERSION, ADD, flags)
    return Encoded(
        key=(header.ledger_id, header.entry_id),
        packet=b"".join((word, request.master_key, request.entry)),
        is_key_unique=False,
    )


def decode(packet: bytes) -> Reply:
    """Decode the reply to an add. Raises CorruptionError."""
    if len(packet) != _REPLY.size:
        raise CorruptionError("V2 reply of the wrong length", packet_bytes=len(packet))
    version, opcode, _, code, ledger_id, entry_id = _REPLY.unpack(packet)
    if (version, opcode) != (VERSION, ADD):
        raise CorruptionError("not a V2 reply to an add", version=version, operation=opcode)
    return Reply(key=(ledger_id, entry_id), status=Status.of_v2(code), code=code)
