"""Frames: a 4-byte length (big-endian, not counting itself), then a packet of that many bytes.

Frames are the same in both protocols and both directions. A bookie closes the connection without a
reply if a frame is longer than its ``nettyMaxFrameSizeBytes``, which includes the length field.
BookKeeper's default is 5,242,880, Pulsar's 5,253,120; operators may raise it. The limit is not
known to clients. They need not know it if all bookies have the same one: entries that one bookie
accepted, the others accept too.
"""

import struct

from ledgers.errors import CorruptionError, RejectedError

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Limit in both directions, with the length field. It exceeds any sensible setting of a bookie."""

_LENGTH = struct.Struct(">i")


def frame(packet: bytes, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Return the packet with its length. Raises RejectedError if the frame would be too long."""
    if not 0 < len(packet) <= frame_bytes_max - _LENGTH.size:
        raise RejectedError("packet does not fit into a frame", packet_bytes=len(packet))
    return _LENGTH.pack(len(packet)) + packet


class FrameReader:
    """Cuts a stream of bytes into packets, however it was split. Keeps at most one incomplete frame
    and the bytes fed since. A length is checked as soon as it is received."""

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._packet_bytes_max = frame_bytes_max - _LENGTH.size
        self._buffer = bytearray()

    @property
    def has_bytes(self) -> bool:
        """True if bytes were fed that are not part of a returned packet."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_packet(self) -> bytes | None:
        """Return the next whole packet; None if more bytes are needed. Raises CorruptionError if a
        length is impossible; the stream cannot be used after that."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (packet_bytes,) = _LENGTH.unpack_from(self._buffer)
        if not 0 < packet_bytes <= self._packet_bytes_max:
            raise CorruptionError("frame length out of bounds", packet_bytes=packet_bytes)
        end = _LENGTH.size + packet_bytes
        if len(self._buffer) < end:
            return None
        packet = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return packet
