"""Impossible metadata is refused, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest

from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.codec.metadata import parse_metadata
from ledgers.errors import CorruptionError
from tests.ledgers.metadata_messages import HEADER, binary, binary_of, closed_message


def _bad_bookie(message: LedgerMetadataFormat) -> None:
    message.segment[0].ensembleMember[0] = "../available"


def _short_ensemble(message: LedgerMetadataFormat) -> None:
    message.segment[1].ensembleMember.pop()


def _negative_start(message: LedgerMetadataFormat) -> None:
    message.segment[0].firstEntryId = -1


def _late_start(message: LedgerMetadataFormat) -> None:
    message.segment[0].firstEntryId = 1


def _equal_starts(message: LedgerMetadataFormat) -> None:
    message.segment[1].firstEntryId = 0


def _no_segments(message: LedgerMetadataFormat) -> None:
    message.ClearField("segment")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        pytest.param(_bad_bookie, "not a bookie id", id="an id that would be a path"),
        pytest.param(_short_ensemble, "ensemble of another size", id="a bookie too few"),
        pytest.param(_negative_start, "begins below 0", id="a negative first entry"),
        pytest.param(_late_start, "ascend from entry 0", id="entry 0 has no segment"),
        pytest.param(_equal_starts, "ascend from entry 0", id="two segments at one entry"),
        pytest.param(_no_segments, "without a segment", id="no segment"),
    ],
)
def test_impossible_segments_are_refused(
    spoil: Callable[[LedgerMetadataFormat], None], what: str
) -> None:
    message = closed_message()

    spoil(message)

    with pytest.raises(CorruptionError, match=what):
        parse_metadata(binary_of(message))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param({"ackQuorumSize": 3}, "impossible quorums", id="A > W"),
        pytest.param({"quorumSize": 3}, "impossible quorums", id="W > E"),
        pytest.param({"quorumSize": 0, "ackQuorumSize": 0}, "impossible quorums", id="W = 0"),
        pytest.param({"quorumSize": -1}, "impossible quorums", id="a negative W"),
        pytest.param({"lastEntryId": -2}, "below -1", id="an end below -1"),
        pytest.param(
            {"lastEntryId": 1 << 62}, "impossibly high", id="an end that no segment reaches"
        ),
        pytest.param(
            {"lastEntryId": None}, "without its last entry id", id="closed without an end"
        ),
        pytest.param({"state": None}, "lacks state", id="no state"),
        pytest.param({"length": None}, "lacks length", id="no length"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CorruptionError, match=what):
        parse_metadata(binary_of(closed_message(**changes)))


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        pytest.param("3809", "unknown value", id="a digest type that we do not know"),
        pytest.param("2a0131", "unknown value", id="a known field of another type"),
        pytest.param("5a050a01ff1200", "not UTF-8", id="a custom key that is not UTF-8"),
        pytest.param("3206", "not the bytes", id="a field cut short"),
        pytest.param("32020a00", "lacks segment", id="a segment without its first entry"),
    ],
)
def test_impossible_fields_are_refused(extra: str, what: str) -> None:
    body = closed_message().SerializeToString() + bytes.fromhex(extra)

    with pytest.raises(CorruptionError, match=what):
        parse_metadata(binary(body))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"ffffffffff7f", id="a length of more than 32 bits"),
        pytest.param(b"ffffffff0f", id="a length of 4 GiB"),
        pytest.param(b"ff", id="a length cut short"),
    ],
)
def test_a_length_beyond_the_data_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptionError, match="cut short"):
        parse_metadata(HEADER % 3 + bytes.fromhex(body.decode()))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param("1\n1\n0\n0\ta:1\n5\tCLOSED\n7\tb:1\n", id="a segment behind the end"),
        pytest.param("2\n2\n0\n0\ta:1\tb:1\n5\tCLOSED\tb:1\n", id="an end that names a bookie"),
        pytest.param("1\n1\n0\n0\ta:1\r\n", id="a carriage return"),
        pytest.param("1\n1\n0\n0 a:1\n", id="a blank for a tab"),
        pytest.param("1\n1\n0\n1_0\ta:1\n", id="a number as Python writes it"),
        pytest.param("1\n1\n٣\n0\ta:1\n", id="digits of another script"),
        pytest.param("1\n1\n9223372036854775808\n0\ta:1\n", id="a number of 64 bits and a sign"),
        pytest.param("1\n1\n0\n-1\tCLOSED\n", id="no segment"),
        pytest.param("1\n1\n0\n0\ta:1\n-3\tCLOSED", id="an end below -1"),
        pytest.param("1\n1\n0\n0\ta:1\t\n", id="an empty bookie id"),
    ],
)
def test_impossible_lines_are_refused(lines: str) -> None:
    with pytest.raises(CorruptionError):
        parse_metadata(HEADER % 1 + lines.encode())
