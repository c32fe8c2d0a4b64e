"""Packets in a stream of bytes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.errors import CorruptionError, RejectedError
from ledgers.wire.framing import FRAME_BYTES_MAX, FrameReader, frame


def packets_of(reader: FrameReader) -> list[bytes]:
    return list(iter(reader.next_packet, None))


@given(
    packets=st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_packets_are_complete_however_the_stream_is_cut(
    packets: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(frame, packets))
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    reader, seen = FrameReader(), []

    for start, end in zip([0, *ends], ends, strict=False):
        reader.feed(stream[start:end])
        seen += packets_of(reader)

    assert seen == packets


def test_bytes_that_come_one_by_one_make_the_same_packets() -> None:
    reader, seen = FrameReader(), []

    for byte in frame(b"abc") + frame(b"d"):
        reader.feed(bytes([byte]))
        seen += packets_of(reader)

    assert seen == [b"abc", b"d"]


@pytest.mark.parametrize(
    ("length", "is_good"),
    [
        pytest.param(1, True, id="the shortest"),
        pytest.param(96, True, id="exactly the limit, which counts the length field"),
        pytest.param(97, False, id="one byte more"),
        pytest.param(0, False, id="zero"),
        pytest.param(-1, False, id="negative"),
        pytest.param(2**31 - 1, False, id="absurd"),
    ],
)
def test_a_length_is_checked_before_its_packet_arrives(length: int, is_good: bool) -> None:
    reader = FrameReader(frame_bytes_max=100)

    reader.feed(struct.pack(">i", length))

    if is_good:
        assert reader.next_packet() is None
    else:
        with pytest.raises(CorruptionError):
            reader.next_packet()


def test_packets_before_a_bad_length_are_good() -> None:
    reader = FrameReader()
    reader.feed(frame(b"good") + b"\x00\x00\x00\x00")

    assert reader.next_packet() == b"good"
    with pytest.raises(CorruptionError):
        reader.next_packet()


@pytest.mark.parametrize(
    ("packet_bytes", "fits"),
    [
        pytest.param(0, False, id="nothing"),
        pytest.param(FRAME_BYTES_MAX - 4, True, id="the longest"),
        pytest.param(FRAME_BYTES_MAX - 3, False, id="one byte more"),
    ],
)
def test_a_packet_longer_than_any_bookie_accepts_is_not_sent(packet_bytes: int, fits: bool) -> None:
    packet = bytes(packet_bytes)

    if fits:
        assert len(frame(packet)) == FRAME_BYTES_MAX
    else:
        with pytest.raises(RejectedError):
            frame(packet)


@pytest.mark.parametrize(
    "packet_bytes",
    [
        pytest.param(5_242_888 - 4, id="BookKeeper's longest add, returned over V3"),
        pytest.param(5_253_120 - 4, id="Pulsar's longest"),
        pytest.param(20_000_000, id="where operators raised the limit"),
    ],
)
def test_packets_as_long_as_bookies_may_send_are_accepted(packet_bytes: int) -> None:
    packet = bytes(packet_bytes)
    reader = FrameReader()

    reader.feed(struct.pack(">i", len(packet)) + packet)

    assert reader.next_packet() == packet
