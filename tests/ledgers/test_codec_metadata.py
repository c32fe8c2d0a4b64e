"""Metadata of ledgers as Java reads and writes it, and what a rewrite keeps."""

import pytest

from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.errors import CorruptionError
from ledgers.model import BookieId, DigestType, LedgerState
from tests.ledgers.metadata_messages import GOLDEN, HEADER, binary_of, closed_message, name_of
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
