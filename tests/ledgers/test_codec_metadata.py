"""Metadata of ledgers as Java reads and writes it, what a rewrite keeps, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.codec.metadata import may_name, parse_metadata, serialize_metadata
from ledgers.errors import CorruptionError
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment
from tests.ledgers.metadata_messages import (
    GOLDEN,
    HEADER,
    binary,
    binary_of,
    closed_message,
    name_of,
)
from tests.vectors import Case, cases

# --- as Java --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_metadata_is_read_as_java_reads_it(case: Case) -> None:
    metadata = parse_metadata(bytes.fromhex(case["bytes"]))

    assert metadata.metadata_version == case["version"]
    assert metadata.ensemble_size == case["ensemble_size"]
    assert metadata.write_quorum == case["write_quorum"]
    assert metadata.ack_quorum == case["ack_quorum"]
    assert metadata.state is LedgerState[case["state"]]
    assert metadata.length == case["length"]
    assert metadata.last_entry_id == case["last_entry_id"]
    assert metadata.password == (bytes.fromhex(case["password"]) if case["has_password"] else None)
    if case["has_password"]:
        assert metadata.digest_type is DigestType[case["digest_type"].replace("MAC", "HMAC")]
    # Version 1 has no place for it, for which Java's getter says -1.
    assert metadata.ctime_ms == (None if case["version"] == 1 else case["ctime"])
    assert (metadata.c_token or 0) == case["c_token"]
    assert {key: value.hex() for key, value in metadata.custom} == case["custom_metadata"]
    assert [
        {"first_entry_id": segment.first_entry_id, "ensemble": list(segment.ensemble)}
        for segment in metadata.segments
    ] == case["segments"]


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_a_rewrite_gives_the_bytes_that_were_read(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    assert serialize_metadata(parse_metadata(data)) == data


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN if case["java_rewrites_as"] != "same"], ids=name_of
)
def test_a_different_serialization_by_java_means_the_same(case: Case) -> None:
    ours = parse_metadata(bytes.fromhex(case["bytes"]))
    of_java = parse_metadata(bytes.fromhex(case["java_rewrites_as"]))

    assert sorted(of_java.custom) == sorted(ours.custom)
    assert of_java.segments == ours.segments
    assert of_java.last_entry_id == ours.last_entry_id
    assert of_java.password == ours.password


@pytest.mark.parametrize("case", cases("ledger_metadata_odd"), ids=name_of)
def test_border_cases_are_accepted_or_refused_as_by_java(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    if case["java"] == "accepts":
        parse_metadata(data)
    else:
        with pytest.raises(CorruptionError):
            parse_metadata(data)


def test_escapes_and_pieces_of_text_are_joined() -> None:
    case = next(case for case in cases("ledger_metadata_odd") if "two pieces" in case["name"])

    metadata = parse_metadata(bytes.fromhex(case["bytes"]))

    assert metadata.password == b"passwd"


# --- Kept by a rewrite ----------------------------------------------------------------------------


UNKNOWN = bytes.fromhex("a20603616263f80605")
"""Field 100, three bytes, and field 111, a varint: a later version's, so to speak."""


def test_absent_optional_fields_stay_absent() -> None:
    data = binary_of(closed_message())

    metadata = parse_metadata(data)

    assert (metadata.ack_quorum, metadata.has_ack_quorum) == (2, False)
    assert (metadata.password, metadata.digest_type) == (None, None)
    assert (metadata.ctime_ms, metadata.c_token) == (None, None)
    assert serialize_metadata(metadata) == data


def test_an_empty_password_is_not_an_absent_one() -> None:
    data = binary_of(closed_message(password=b""))

    metadata = parse_metadata(data)

    assert metadata.password == b""
    assert serialize_metadata(metadata) == data


def test_unknown_fields_survive_on_every_level() -> None:
    message = closed_message(password=b"p")
    message.segment[0].MergeFromString(UNKNOWN)
    message.customMetadata.add(key="plain", value=b"1")
    message.customMetadata.add(key="odd", value=b"2").MergeFromString(UNKNOWN)
    message.MergeFromString(UNKNOWN)

    metadata = parse_metadata(binary_of(message))

    assert metadata.segments[0].unknown_fields == UNKNOWN
    assert metadata.segments[1].unknown_fields == b""
    assert metadata.unknown_fields.startswith(UNKNOWN)
    assert metadata.custom == (("plain", b"1"),)
    assert serialize_metadata(metadata) == binary_of(message)


def test_unknown_fields_survive_a_repair() -> None:
    message = closed_message()
    message.segment[0].MergeFromString(UNKNOWN)
    message.MergeFromString(UNKNOWN)
    metadata = parse_metadata(binary_of(message))

    repaired = metadata.with_segment(metadata.segments[0].with_bookies({1: BookieId("new:1")}))

    message.segment[0].ensembleMember[1] = "new:1"
    assert serialize_metadata(repaired) == binary_of(message)


@pytest.mark.parametrize("version", [2, 3])
def test_custom_metadata_without_a_value_is_kept(version: int) -> None:
    body = (
        b"quorumSize: 1\nensembleSize: 1\nlength: 0\nlastEntryId: -1\nstate: OPEN\nsegment {\n"
        b'  ensembleMember: "a:1"\n  firstEntryId: 0\n}\ncustomMetadata {\n  key: "k"\n}\n'
    )
    data = HEADER % 2 + body
    if version == 3:
        message = closed_message()
        message.customMetadata.add(key="k")
        data = binary_of(message)

    assert serialize_metadata(parse_metadata(data)) == data


def test_bytes_behind_the_message_are_dropped_as_java_drops_them() -> None:
    data = binary_of(closed_message())

    assert serialize_metadata(parse_metadata(data + b"surplus")) == data


@pytest.mark.parametrize("state", [LedgerMetadataFormat.OPEN, LedgerMetadataFormat.IN_RECOVERY])
def test_length_and_end_of_an_unclosed_ledger_are_ignored(
    state: LedgerMetadataFormat.State.ValueType,
) -> None:
    metadata = parse_metadata(binary_of(closed_message(state=state, length=77, lastEntryId=7)))

    assert (metadata.length, metadata.last_entry_id) == (0, -1)
    assert serialize_metadata(metadata) == binary_of(
        closed_message(state=state, length=0, lastEntryId=-1)
    )


# --- Impossible metadata --------------------------------------------------------------------------


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


# --- Bookies that unreadable metadata may name ----------------------------------------------------


HERE, THERE, ELSEWHERE = BookieId("b1:3181"), BookieId("b2:3181"), BookieId("b3:3181")


def written(*ensembles: tuple[BookieId, ...], version: int = 3) -> bytes:
    return serialize_metadata(
        LedgerMetadata(
            metadata_version=version,
            ensemble_size=2,
            write_quorum=2,
            ack_quorum=2,
            state=LedgerState.OPEN,
            length=0,
            last_entry_id=-1,
            digest_type=None,
            password=None,
            segments=tuple(
                Segment(first_entry_id=10 * place, ensemble=ensemble)
                for place, ensemble in enumerate(ensembles)
            ),
            has_ack_quorum=version > 1,
        )
    )


WHOLE = written((THERE, ELSEWHERE), (ELSEWHERE, THERE))


def of_version_4(data: bytes) -> bytes:
    return data.replace(b"Version\t3", b"Version\t4")


@pytest.mark.parametrize(
    ("data", "may"),
    [
        pytest.param(of_version_4(WHOLE), False, id="a later version that is as version 3 was"),
        pytest.param(WHOLE, False, id="all that it names are others"),
        pytest.param(WHOLE.replace(b"b2:3181", b"b1:3181"), True, id="it names it"),
        pytest.param(WHOLE + b"b1:3181", True, id="its id is behind the end"),
        pytest.param(b"", True, id="empty"),
        pytest.param(WHOLE[:-1], True, id="cut short by a byte"),
        pytest.param(WHOLE[:35], True, id="cut short before any bookie"),
        pytest.param(b"rubbish that names b2:3181 and b3:3181", True, id="no metadata"),
        pytest.param(written((THERE, ELSEWHERE), version=1), True, id="lines may be missing"),
        pytest.param(written((THERE, ELSEWHERE), version=2), True, id="text may be missing"),
        pytest.param(
            WHOLE.replace(b"b2:3181", b"b\n:3181", 1), True, id="an id that is impossible"
        ),
        pytest.param(WHOLE.replace(b"b2:3181", b"b\xff:3181", 1), True, id="an id without letters"),
        pytest.param(WHOLE.replace(b"\x10\x02", b"\x10\x03"), True, id="ensembles lack a bookie"),
    ],
)
def test_only_a_complete_record_proves_that_it_names_others(data: bytes, may: bool) -> None:
    assert may_name(data, HERE) is may


def test_metadata_without_an_ensemble_proves_nothing() -> None:
    whole = written((THERE, ELSEWHERE))
    later_only = whole.replace(b"\x10\x00", b"\x10\x05")  # its one segment begins at entry 5
    assert later_only != whole

    assert may_name(later_only, HERE)
