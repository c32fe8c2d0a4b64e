"""Any metadata survives its znode, and any bytes are accepted or refused as documented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.codec.metadata import LAST_ENTRY_MAX, parse_metadata, serialize_metadata
from ledgers.errors import CorruptionError
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment
from tests.ledgers.metadata_messages import GOLDEN, HEADER, name_of
from tests.vectors import Case

INT64 = st.integers(-(2**63), 2**63 - 1)
BOOKIE_IDS = st.from_regex(r"[A-Za-z0-9:-_.\-]{1,20}", fullmatch=True).filter(
    lambda name: name.lower() != "readonly"
)
CUSTOM_KEYS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=10)


@st.composite
def any_metadata(draw: st.DrawFn) -> LedgerMetadata:
    version = draw(st.sampled_from([1, 2, 3]))
    ensemble_size = draw(st.integers(1, 5))
    write_quorum = draw(st.integers(1, ensemble_size))
    ack_quorum = draw(st.integers(-1, write_quorum))  # Java writes those below 1 too
    has_ack_quorum = version != 1 and (ack_quorum < write_quorum or draw(st.booleans()))
    starts = sorted(draw(st.sets(st.integers(1, LAST_ENTRY_MAX), max_size=3)) | {0})
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
        last_entry_id=draw(st.integers(-1, LAST_ENTRY_MAX)) if is_closed else -1,
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


@given(any_metadata())
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
    [type.googleapis.com/bookmender.metadata.AuditorVoteFormat] google.protobuf.Any
"""


@given(st.lists(st.sampled_from(TEXT_WORDS.split()), max_size=40).map(" ".join))
def test_any_text_of_the_format_is_accepted_or_refused(text: str) -> None:
    _accepted_or_refused(HEADER % 2 + text.encode())


@pytest.mark.parametrize("case", GOLDEN[::3], ids=name_of)
@given(data=st.data())
def test_damaged_metadata_is_accepted_or_refused(case: Case, data: st.DataObject) -> None:
    good = bytearray.fromhex(case["bytes"])
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))

    _accepted_or_refused(bytes(good))


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN if case["version"] == 3 and len(case["bytes"]) < 800],
    ids=name_of,
)
def test_every_truncation_of_binary_metadata_is_refused(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            parse_metadata(data[:length])


@pytest.mark.parametrize("case", [case for case in GOLDEN if case["version"] < 3][::4], ids=name_of)
def test_any_truncation_of_text_metadata_is_accepted_or_refused(case: Case) -> None:
    data = bytes.fromhex(case["bytes"])

    for length in range(len(data)):
        _accepted_or_refused(data[:length])
