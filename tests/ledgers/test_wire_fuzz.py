"""Any bytes of a peer: a value or CorruptionError, and never another error."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.errors import CorruptionError
from ledgers.wire import v2, v3
from ledgers.wire.framing import FrameReader
from tests.vectors import cases

Decode = Callable[[bytes], object]


def drain(stream: bytes) -> object:
    reader = FrameReader()
    reader.feed(stream)
    return list(iter(reader.next_packet, None))


def packets(name: str) -> list[bytes]:
    """Return replies to our requests, and none of an exchange between authentication plugins."""
    replies = (case for case in cases(name) if case["direction"] == "reply")
    frames = (case["frame"] for case in replies if "auth_plugin_name" not in case["fields"])
    return [bytes.fromhex(frame)[4:] for frame in frames]


SAMPLES: dict[Decode, list[bytes]] = {
    v2.decode: [packet for packet in packets("frames_v2") if packet[1] == v2.ADD],
    v3.decode: packets("frames_v3"),
    drain: [bytes.fromhex(case["frame"]) for case in cases("frames_v2")],
}
DECODERS = pytest.mark.parametrize("decode", SAMPLES, ids=["V2 replies", "V3 replies", "frames"])


def is_accepted(decode: Decode, data: bytes) -> bool:
    try:
        decode(data)
    except CorruptionError:
        return False
    return True


@DECODERS
def test_the_samples_are_accepted(decode: Decode) -> None:
    assert all(is_accepted(decode, sample) for sample in SAMPLES[decode])


@DECODERS
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_in_the_documented_way(decode: Decode, data: bytes) -> None:
    is_accepted(decode, data)


@DECODERS
@given(data=st.data())
def test_truncated_samples_are_accepted_or_refused(decode: Decode, data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES[decode]))
    size = data.draw(st.integers(0, len(sample)))

    is_accepted(decode, sample[:size])


@DECODERS
@given(data=st.data())
def test_samples_with_flipped_bits_are_accepted_or_refused(
    decode: Decode, data: st.DataObject
) -> None:
    sample = bytearray(data.draw(st.sampled_from(SAMPLES[decode])))
    for _ in range(data.draw(st.integers(1, 4))):
        bit = data.draw(st.integers(0, 8 * len(sample) - 1))
        sample[bit // 8] ^= 1 << bit % 8

    is_accepted(decode, bytes(sample))
