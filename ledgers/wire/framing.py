"""Frames: a 4-byte length (big-endian, not counting itself), then a packet of that many bytes.

Frames are the same in both protocols and both directions. A bookie closes the connection without a
reply if a frame is longer than its ``nettyMaxFrameSizeBytes``, which includes the length field
(BookKeeper's default is 5,242,880, Pulsar's 5,253,120; operators may raise it). The limit is not known
to clients. They need not know it if all bookies have the same one: entries that one bookie accepted,
the others accept too.
"""

import struct

from ledgers.errors import CorruptionError, RejectedError

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Both ways, the length field counted. More than any bookie may be set to take; a greater length is
no length."""

_LENGTH = struct.Struct(">i")


def frame(packet: bytes, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The packet with its length. Raises RejectedError for one that is longer than that."""
    if not 0 < len(packet) <= frame_bytes_max - _LENGTH.size:
        raise RejectedError("packet does not fit into a frame", packet_bytes=len(packet))
    return _LENGTH.pack(len(packet)) + packet


class FrameReader:
    """Cuts a stream of bytes into packets, however the stream was split on its way.

    Holds at most one incomplete frame and what was fed since. A length is judged as soon as it is
    there, before a byte of its packet is waited for.
    """

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._packet_bytes_max = frame_bytes_max - _LENGTH.size
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_packet(self) -> bytes | None:
        """The next whole packet, or None until more is fed.

        Raises CorruptionError for a length that is not positive or beyond the limit. Where the next
        frame begins is then unknown, so the stream is useless from there on.
        """
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
