from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.errors import CorruptionError
from ledgers.formats.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.formats.metadata_codec import parse_metadata, serialize_metadata
from ledgers.metadata import BookieId, DigestType, LedgerMetadata, LedgerState, Segment
from tests.vectors import Case, cases

GOLDEN = cases("ledger_metadata")
HEADER = b"BookieMetadataFormatVersion\t%d\n"


def _name(case: Case) -> str:
    name: str = case["name"]
    return name


def _bookies(*names: str) -> tuple[BookieId, ...]:
    return tuple(map(BookieId, names))


# --- as Java ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN, ids=_name)
def test_metadata_says_what_java_reads_in_it(case: Case) -> None:
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


@pytest.mark.parametrize("case", GOLDEN, ids=_name)
def test_a_rewrite_gives_the_bytes_that_were_read(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    assert serialize_metadata(parse_metadata(data)) == data


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN if case["java_rewrites_as"] != "same"], ids=_name
)
def test_what_java_rewrites_differently_means_the_same(case: Case) -> None:
    ours = parse_metadata(bytes.fromhex(case["bytes"]))
    of_java = parse_metadata(bytes.fromhex(case["java_rewrites_as"]))

    assert sorted(of_java.custom) == sorted(ours.custom)
    assert of_java.segments == ours.segments
    assert of_java.last_entry_id == ours.last_entry_id
    assert of_java.password == ours.password


@pytest.mark.parametrize("case", cases("ledger_metadata_odd"), ids=_name)
def test_data_at_the_edge_is_accepted_or_refused_as_by_java(case: Case) -> None:
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


# --- what a rewrite keeps --------------------------------------------------------------------------


def _message(**changes: Any) -> LedgerMetadataFormat:
    """A closed ledger's message, with fields set to other values, or cleared by None."""
    message = LedgerMetadataFormat(
        quorumSize=2, ensembleSize=2, length=10, lastEntryId=9, state=LedgerMetadataFormat.CLOSED
    )
    message.segment.add(ensembleMember=["a:1", "b:1"], firstEntryId=0)
    message.segment.add(ensembleMember=["c:1", "b:1"], firstEntryId=5)
    for field, value in changes.items():
        if value is None:
            message.ClearField(field)  # type: ignore[arg-type]  # any field's name
        else:
            setattr(message, field, value)
    return message


def _binary(body: bytes) -> bytes:
    assert len(body) < 128
    return HEADER % 3 + bytes([len(body)]) + body


def _binary_of(message: LedgerMetadataFormat) -> bytes:
    return _binary(message.SerializePartialToString())


UNKNOWN = bytes.fromhex("a20603616263f80605")
"""Field 100, three bytes, and field 111, a varint: a later version's, so to speak."""


def test_optional_fields_that_are_absent_stay_absent() -> None:
    data = _binary_of(_message())

    metadata = parse_metadata(data)

    assert (metadata.ack_quorum, metadata.has_ack_quorum) == (2, False)
    assert (metadata.password, metadata.digest_type) == (None, None)
    assert (metadata.ctime_ms, metadata.c_token) == (None, None)
    assert serialize_metadata(metadata) == data


def test_an_empty_password_is_not_an_absent_one() -> None:
    data = _binary_of(_message(password=b""))

    metadata = parse_metadata(data)

    assert metadata.password == b""
    assert serialize_metadata(metadata) == data


def test_unknown_fields_survive_on_every_level() -> None:
    message = _message(password=b"p")
    message.segment[0].MergeFromString(UNKNOWN)
    message.customMetadata.add(key="plain", value=b"1")
    message.customMetadata.add(key="odd", value=b"2").MergeFromString(UNKNOWN)
    message.MergeFromString(UNKNOWN)

    metadata = parse_metadata(_binary_of(message))

    assert metadata.segments[0].unknown_fields == UNKNOWN
    assert metadata.segments[1].unknown_fields == b""
    assert metadata.unknown_fields.startswith(UNKNOWN)
    assert metadata.custom == (("plain", b"1"),)
    assert serialize_metadata(metadata) == _binary_of(message)


def test_unknown_fields_survive_a_repair() -> None:
    message = _message()
    message.segment[0].MergeFromString(UNKNOWN)
    message.MergeFromString(UNKNOWN)
    metadata = parse_metadata(_binary_of(message))

    repaired = metadata.with_segment(metadata.segments[0].with_bookies({1: BookieId("new:1")}))

    message.segment[0].ensembleMember[1] = "new:1"
    assert serialize_metadata(repaired) == _binary_of(message)


@pytest.mark.parametrize("version", [2, 3])
def test_custom_metadata_without_a_value_is_kept(version: int) -> None:
    body = (
        b"quorumSize: 1\nensembleSize: 1\nlength: 0\nlastEntryId: -1\nstate: OPEN\nsegment {\n"
        b'  ensembleMember: "a:1"\n  firstEntryId: 0\n}\ncustomMetadata {\n  key: "k"\n}\n'
    )
    data = HEADER % 2 + body
    if version == 3:
        message = _message()
        message.customMetadata.add(key="k")
        data = _binary_of(message)

    assert serialize_metadata(parse_metadata(data)) == data


def test_bytes_behind_the_message_are_dropped_as_java_drops_them() -> None:
    data = _binary_of(_message())

    assert serialize_metadata(parse_metadata(data + b"surplus")) == data


@pytest.mark.parametrize("state", [LedgerMetadataFormat.OPEN, LedgerMetadataFormat.IN_RECOVERY])
def test_length_and_end_of_an_unclosed_ledger_mean_nothing(
    state: LedgerMetadataFormat.State.ValueType,
) -> None:
    metadata = parse_metadata(_binary_of(_message(state=state, length=77, lastEntryId=7)))

    assert (metadata.length, metadata.last_entry_id) == (0, -1)
    assert serialize_metadata(metadata) == _binary_of(
        _message(state=state, length=0, lastEntryId=-1)
    )


# --- what is refused -------------------------------------------------------------------------------


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
        pytest.param(_late_start, "ascend from entry 0", id="entry 0 belongs to nobody"),
        pytest.param(_equal_starts, "ascend from entry 0", id="two segments at one entry"),
        pytest.param(_no_segments, "without a segment", id="no segment"),
    ],
)
def test_segments_that_make_no_sense_are_refused(
    spoil: Callable[[LedgerMetadataFormat], None], what: str
) -> None:
    message = _message()

    spoil(message)

    with pytest.raises(CorruptionError, match=what):
        parse_metadata(_binary_of(message))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param({"ackQuorumSize": 3}, "impossible quorums", id="A > W"),
        pytest.param({"ackQuorumSize": 0}, "impossible quorums", id="A = 0"),
        pytest.param({"quorumSize": 3}, "impossible quorums", id="W > E"),
        pytest.param({"quorumSize": -1}, "impossible quorums", id="a negative W"),
        pytest.param({"lastEntryId": -2}, "below -1", id="an end below -1"),
        pytest.param(
            {"lastEntryId": None}, "without its last entry id", id="closed without an end"
        ),
        pytest.param({"state": None}, "lacks state", id="no state"),
        pytest.param({"length": None}, "lacks length", id="no length"),
    ],
)
def test_values_that_make_no_sense_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CorruptionError, match=what):
        parse_metadata(_binary_of(_message(**changes)))


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        pytest.param("3809", "strange value", id="a digest type that we do not know"),
        pytest.param("2a0131", "strange value", id="a known field of another type"),
        pytest.param("5a050a01ff1200", "not UTF-8", id="a custom key that is not UTF-8"),
        pytest.param("3206", "not the bytes", id="a field cut short"),
        pytest.param("32020a00", "lacks segment", id="a segment without its first entry"),
    ],
)
def test_fields_that_make_no_sense_are_refused(extra: str, what: str) -> None:
    body = _message().SerializeToString() + bytes.fromhex(extra)

    with pytest.raises(CorruptionError, match=what):
        parse_metadata(_binary(body))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"ffffffffff7f", id="a length of more than 32 bits"),
        pytest.param(b"ffffffff0f", id="a length of 4 GiB"),
        pytest.param(b"ff", id="a length cut short"),
    ],
)
def test_a_length_that_the_data_does_not_have_is_refused(body: bytes) -> None:
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
def test_lines_that_make_no_sense_are_refused(lines: str) -> None:
    with pytest.raises(CorruptionError):
        parse_metadata(HEADER % 1 + lines.encode())


# --- any metadata, any bytes -----------------------------------------------------------------------

INT64 = st.integers(-(2**63), 2**63 - 1)
BOOKIE_IDS = st.from_regex(r"[A-Za-z0-9:-_.\-]{1,20}", fullmatch=True).filter(
    lambda name: name.lower() != "readonly"
)
CUSTOM_KEYS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=10)


@st.composite
def _metadata(draw: st.DrawFn) -> LedgerMetadata:
    version = draw(st.sampled_from([1, 2, 3]))
    ensemble_size = draw(st.integers(1, 5))
    write_quorum = draw(st.integers(1, ensemble_size))
    ack_quorum = draw(st.integers(1, write_quorum))
    has_ack_quorum = version != 1 and (ack_quorum < write_quorum or draw(st.booleans()))
    starts = sorted(draw(st.sets(st.integers(1, 2**63 - 1), max_size=3)) | {0})
    ensembles = st.tuples(*[BOOKIE_IDS.map(BookieId)] * ensemble_size)
    state = draw(st.sampled_from(LedgerState))
    is_closed = state is LedgerState.CLOSED
    has_fields = version != 1
    return LedgerMetadata(
        metadata_version=version,
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum if has_fields else write_quorum,
        has_ack_quorum=has_ack_quorum,
        state=state,
        length=draw(INT64) if is_closed else 0,
        last_entry_id=draw(st.integers(-1, 2**63 - 1)) if is_closed else -1,
        digest_type=draw(st.none() | st.sampled_from(DigestType)) if has_fields else None,
        password=draw(st.none() | st.binary(max_size=20)) if has_fields else None,
        ctime_ms=draw(st.none() | INT64) if has_fields else None,
        c_token=draw(st.none() | INT64) if has_fields else None,
        custom=(
            tuple(draw(st.lists(st.tuples(CUSTOM_KEYS, st.binary(max_size=20)), max_size=3)))
            if has_fields
            else ()
        ),
        segments=tuple(Segment(first_entry_id=s, ensemble=draw(ensembles)) for s in starts),
    )


@given(_metadata())
def test_any_metadata_survives_its_znode(metadata: LedgerMetadata) -> None:
    data = serialize_metadata(metadata)

    assert parse_metadata(data) == metadata
    assert serialize_metadata(parse_metadata(data)) == data


def _accepted_or_refused(data: bytes) -> None:
    try:
        metadata = parse_metadata(data)
    except CorruptionError:
        return
    assert parse_metadata(serialize_metadata(metadata)) == metadata


@given(st.binary(max_size=100), st.sampled_from([1, 2, 3]))
def test_garbage_is_refused_in_the_documented_way(garbage: bytes, version: int) -> None:
    _accepted_or_refused(garbage)
    _accepted_or_refused(HEADER % version + garbage)
    _accepted_or_refused(HEADER % 3 + bytes([len(garbage)]) + garbage)


TEXT_WORDS = r"""
    segment { } < > [ ] : ; , " ' \ # quorumSize ensembleSize length state OPEN password digestType
    customMetadata key value firstEntryId ensembleMember 0 -1 1e9 0x7f inf "a:1" "\x" "\777" "\377"
    [type.googleapis.com/bookmender.metadata.CookieFormat] google.protobuf.Any
"""


@given(st.lists(st.sampled_from(TEXT_WORDS.split()), max_size=40).map(" ".join))
def test_any_words_of_the_text_format_are_accepted_or_refused(text: str) -> None:
    _accepted_or_refused(HEADER % 2 + text.encode())


@pytest.mark.parametrize("case", GOLDEN[::3], ids=_name)
@given(data=st.data())
def test_damaged_metadata_is_accepted_or_refused(case: Case, data: st.DataObject) -> None:
    good = bytearray.fromhex(case["bytes"])
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))

    _accepted_or_refused(bytes(good))


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN if case["version"] == 3 and len(case["bytes"]) < 800],
    ids=_name,
)
def test_every_truncation_of_binary_metadata_is_refused(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            parse_metadata(data[:length])


@pytest.mark.parametrize("case", [case for case in GOLDEN if case["version"] < 3][::4], ids=_name)
def test_every_truncation_of_text_metadata_is_accepted_or_refused(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    for length in range(len(data)):
        _accepted_or_refused(data[:length])
