"""The text format of protobuf, compared with Java's."""

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.codec.protobuf import format_text, parse_binary, parse_text
from ledgers.errors import CorruptionError

Entry = LedgerMetadataFormat.cMetadataMapEntry


@given(st.binary())
def test_any_bytes_survive_the_text_format(value: bytes) -> None:
    assert parse_text(format_text(Entry(value=value)), Entry).value == value


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_string_survives_the_text_format(key: str) -> None:
    text = format_text(Entry(key=key))

    assert parse_text(text, Entry).key == key
    assert text.count(b"\n") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param(rb'"\a\v\?"', None, id="a C escape that we do not need"),
        pytest.param(rb'"\a\v"', b"\x07\x0b", id="as protobuf-java 3 wrote them"),
        pytest.param(rb'"\1\12\123"', b"\x01\x0aS", id="octal of every length"),
        pytest.param(rb'"\778"', b"?8", id="octal ends at an 8"),
        pytest.param(rb'"\400"', None, id="octal beyond a byte"),
        pytest.param(rb'"\xA\x41B"', b"\x0aAB", id="hexadecimal"),
        pytest.param(rb'"\xg"', None, id="hexadecimal without a digit"),
        pytest.param(rb'"\z"', None, id="no such escape"),
        pytest.param(rb'"\\z"', b"\\z", id="an escaped backslash escapes nothing"),
        pytest.param(rb'"\\\z"', None, id="no such escape behind a backslash"),
        pytest.param(rb'"\N{DASH}"', None, id="an escape that only Python knows"),
        pytest.param('"é"'.encode(), "é".encode(), id="plain UTF-8"),
        pytest.param(b'"\xff"', None, id="not UTF-8"),
        pytest.param(b"'a' \"b\"", b"ab", id="pieces in either quotes"),
        pytest.param(b'"a', None, id="an open quote"),
        pytest.param(b'"a\nb"', None, id="a line feed in quotes"),
    ],
)
def test_escapes_are_read_as_java_reads_them_or_refused(text: bytes, value: bytes | None) -> None:
    if value is None:
        with pytest.raises(CorruptionError):
            parse_text(b"value: " + text, Entry)
    else:
        assert parse_text(b"value: " + text, Entry).value == value


def test_the_last_of_several_values_counts() -> None:
    assert parse_text(b'key: "a" key: "b"', Entry).key == "b"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(CorruptionError, match="ensembleSize, length, state"):
        parse_text(b"quorumSize: 1", LedgerMetadataFormat)
    with pytest.raises(CorruptionError, match="ensembleSize, length, state"):
        parse_binary(b"\x08\x01", LedgerMetadataFormat)


@pytest.mark.parametrize("text", [b'value: "secret" x', b'value: "secret', b'value: "secret\\z"'])
def test_refused_text_is_not_quoted_as_it_may_be_a_password(text: bytes) -> None:
    with pytest.raises(CorruptionError) as raised:
        parse_text(text, Entry)

    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_numbers_of_any_length_are_refused() -> None:
    with pytest.raises(CorruptionError):
        parse_text(b"length: " + b"9" * 10_000, LedgerMetadataFormat)
