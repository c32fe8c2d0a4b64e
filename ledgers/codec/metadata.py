"""Converts the metadata of a ledger to znode bytes and back: versions 1 (lines), 2 (protobuf text)
and 3 (protobuf binary).

``serialize_metadata(parse_metadata(data))`` preserves the version, the presence of optional fields,
the order of segments, bookies and custom metadata, and in version 3 unknown fields (rule S2). For
metadata that Java wrote it returns the same bytes, except for escapes in version 2 that differ
between Java's own versions.

Parsing is stricter than Java's LedgerMetadataSerDe, so that a person is asked and no guess is
written back. In addition to what Java rejects, this module rejects:

- a first segment that does not begin at entry 0;
- a closed ledger without a last entry id (Java assumes 0), or with one below -1;
- an ensemble size or a write quorum below 1 (Java writes ack quorums of 0 and below);
- in version 1: lines behind the end (Java ignores them), plus signs, carriage returns;
- in version 2: bytes that are not UTF-8, and escapes that Java reads but never writes;
- unknown enum values, and in version 2 unknown fields: Java 4.18 drops both when it writes again.

As in Java, bytes behind the message of version 3 are ignored. ``length`` and ``lastEntryId`` of a
ledger that is not closed have no meaning and are written as 0 and -1.

``may_name`` reports whether metadata that cannot be parsed may still name a bookie.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import structs

from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.codec.protobuf import decoded, format_text, parse_binary, parse_text
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import CorruptionError
from ledgers.model import (
    FEED_MARKER,
    LAC_NONE,
    BookieId,
    DigestType,
    LedgerMetadata,
    LedgerOutline,
    LedgerState,
    Segment,
    outline_of,
)

SEGMENTS_MAX = 16_384
"""Segments that are kept to be used again."""
LAST_ENTRY_MAX = 1 << 40
"""A writer of 100,000 entries per second needs four months. A loop over more would not end."""
_HEADER = re.compile(rb"BookieMetadataFormatVersion\t([0-9]{1,10})\n")
_VERSION_3 = b"BookieMetadataFormatVersion\t3\n"
_STATES: dict[int, LedgerState] = {state.value: state for state in LedgerState}
_DIGEST_TYPES: dict[int, DigestType] = {each.value: each for each in DigestType}


def parse_metadata(data: bytes) -> LedgerMetadata:
    """Return the metadata in the znode's bytes. Raises CorruptionError."""
    version, body = split_version(data)
    match version:
        case 1:
            return _of_lines(body)
        case 2:
            return _of_message(parse_text(body, LedgerMetadataFormat), version)
        case 3:
            return _of_message(parse_binary(undelimited(body), LedgerMetadataFormat), version)
    raise CorruptionError("ledger metadata of an unknown version", version=version)


def parse_outline(data: bytes) -> LedgerOutline:
    """Return what the znode's bytes say about the places of the copies. Accepts and refuses the
    same bytes as ``parse_metadata``, and takes half the time for version 3."""
    if not data.startswith(_VERSION_3):
        return outline_of(parse_metadata(data))
    message = parse_binary(undelimited(data[len(_VERSION_3) :]), LedgerMetadataFormat)
    outline = _outline_of(message)
    custom, _ = _custom(message)  # may refuse the bytes, and so may the next one
    _unknown_fields(message)
    return structs.replace(outline, is_of_feed=True) if FEED_MARKER in custom else outline


def split_version(data: bytes) -> tuple[int, bytes]:
    """Return the version in the first line, and the bytes after it. Raises CorruptionError."""
    header = _HEADER.match(data)
    if header is None:
        # No more of the bytes: what follows may contain the ledger's password.
        raise CorruptionError("ledger metadata does not begin with its version", data=data[:16])
    return int(header[1]), data[header.end() :]


def serialize_metadata(metadata: LedgerMetadata) -> bytes:
    """Return the znode's bytes, in the version of the metadata."""
    header = b"BookieMetadataFormatVersion\t%d\n" % metadata.metadata_version
    match metadata.metadata_version:
        case 1:
            return header + "\n".join(_lines(metadata)).encode("utf-8")
        case 2:
            return header + format_text(_message(metadata))
        case 3:
            body = _message(metadata).SerializeToString()
            return b"".join((header, _varint(len(body)), body))
    raise AssertionError(metadata)


# --- Versions 2 and 3: a protobuf message ---------------------------------------------------------


def _of_message(message: LedgerMetadataFormat, version: int) -> LedgerMetadata:
    outline = _outline_of(message)
    custom, odd_custom = _custom(message)
    return LedgerMetadata(
        metadata_version=version,
        ensemble_size=outline.ensemble_size,
        write_quorum=outline.write_quorum,
        ack_quorum=outline.ack_quorum,
        state=outline.state,
        length=outline.length,
        last_entry_id=outline.last_entry_id,
        digest_type=_DIGEST_TYPES[message.digestType] if message.HasField("digestType") else None,
        password=message.password if message.HasField("password") else None,
        ctime_ms=message.ctime if message.HasField("ctime") else None,
        c_token=message.cToken if message.HasField("cToken") else None,
        custom=custom,
        segments=outline.segments,
        has_ack_quorum=message.HasField("ackQuorumSize"),
        unknown_fields=_unknown_fields(message) + odd_custom,
    )


def _outline_of(message: LedgerMetadataFormat) -> LedgerOutline:
    has_ack_quorum = message.HasField("ackQuorumSize")
    state = _STATES[message.state]
    is_closed = state is LedgerState.CLOSED
    if is_closed and not message.HasField("lastEntryId"):
        raise CorruptionError("metadata of a closed ledger without its last entry id")
    outline = LedgerOutline(
        ensemble_size=message.ensembleSize,
        write_quorum=message.quorumSize,
        ack_quorum=message.ackQuorumSize if has_ack_quorum else message.quorumSize,
        state=state,
        length=message.length if is_closed else 0,
        last_entry_id=message.lastEntryId if is_closed else LAC_NONE,
        segments=tuple(
            [_segment_of(segment.SerializePartialToString()) for segment in message.segment]
        ),
    )
    _check(outline)
    return outline


@lru_cache(maxsize=SEGMENTS_MAX)
def _segment_of(data: bytes) -> Segment:
    """Return a serialised segment. Because of the cache, equal segments are one object: many
    ledgers have one segment, on one of few ensembles."""
    segment = LedgerMetadataFormat.Segment.FromString(data)
    return _segment(segment.firstEntryId, segment.ensembleMember, _unknown_fields(segment))


def _custom(message: LedgerMetadataFormat) -> tuple[tuple[tuple[str, bytes], ...], bytes]:
    """Return the custom metadata, and, serialised, its entries that are not just a key and a value.
    These are kept with the unknown fields, so that a rewrite preserves them."""
    if not message.customMetadata:  # the common case
        return (), b""
    plain, odd = [], LedgerMetadataFormat()
    for entry in message.customMetadata:
        if entry.HasField("key") and entry.HasField("value") and not _unknown_fields(entry):
            plain.append((decoded(entry.key), entry.value))
        else:
            odd.customMetadata.append(entry)
    return tuple(plain), odd.SerializePartialToString()


def _unknown_fields(message: Message) -> bytes:
    """Return the unknown fields of the message, serialised, without those of nested messages."""
    unknown = UnknownFieldSet(message)
    if not len(unknown):
        return b""
    for position in range(len(unknown)):
        number = unknown[position].field_number
        if number in message.DESCRIPTOR.fields_by_number:
            # An unknown digest type or state, or a known field of another type.
            raise CorruptionError("ledger metadata has an unknown value", field_number=number)
    rest = type(message)()
    rest.CopyFrom(message)
    for known, _ in message.ListFields():
        rest.ClearField(known.name)
    return rest.SerializePartialToString()


def _message(metadata: LedgerMetadata) -> LedgerMetadataFormat:
    message = LedgerMetadataFormat(
        quorumSize=metadata.write_quorum,
        ensembleSize=metadata.ensemble_size,
        length=metadata.length,
        lastEntryId=metadata.last_entry_id,
        state=LedgerMetadataFormat.State.ValueType(metadata.state.value),
        password=metadata.password,
        ackQuorumSize=metadata.ack_quorum if metadata.has_ack_quorum else None,
        ctime=metadata.ctime_ms,
        cToken=metadata.c_token,
    )
    if metadata.digest_type is not None:
        message.digestType = LedgerMetadataFormat.DigestType.ValueType(metadata.digest_type.value)
    for segment in metadata.segments:
        added = message.segment.add(
            ensembleMember=segment.ensemble, firstEntryId=segment.first_entry_id
        )
        if segment.unknown_fields:
            added.MergeFromString(segment.unknown_fields)
    for key, value in metadata.custom:
        message.customMetadata.add(key=key, value=value)
    if metadata.unknown_fields:
        message.MergeFromString(metadata.unknown_fields)
    return message


def undelimited(body: bytes) -> bytes:
    """Return the message after its length, a varint of at most 32 bits. Raises CorruptionError."""
    length = 0
    for position, byte in enumerate(body[:5]):
        length |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            start = position + 1
            if len(body) - start < length:
                break
            return body[start : start + length]
    raise CorruptionError("ledger metadata is cut short", body_bytes=len(body))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# --- Version 1: lines of fields separated by tabs -------------------------------------------------

_IN_RECOVERY = -102
"""Stored in place of the last entry id of a closed ledger."""


def _of_lines(body: bytes) -> LedgerMetadata:
    try:
        lines = body.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptionError("ledger metadata is not UTF-8") from error
    if len(lines) < 4:
        raise CorruptionError("ledger metadata lacks lines", line_count=len(lines))
    write_quorum, ensemble_size, length = map(_number, lines[:3])
    state, last_entry_id = LedgerState.OPEN, LAC_NONE
    ending, *others = lines[-1].split("\t")
    if others == ["CLOSED"]:
        lines.pop()
        state, last_entry_id = LedgerState.CLOSED, _number(ending)
        if last_entry_id == _IN_RECOVERY:
            state, last_entry_id = LedgerState.IN_RECOVERY, LAC_NONE
    fields = [line.split("\t") for line in lines[3:]]
    if any(others[:1] == ["CLOSED"] for _, *others in fields):
        # Java takes this for the end of the ledger in any line, so it cannot be a bookie id.
        raise CorruptionError("ledger metadata continues after its end")
    outline = LedgerOutline(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=write_quorum,
        state=state,
        length=length if state is LedgerState.CLOSED else 0,
        last_entry_id=last_entry_id,
        segments=tuple(_segment(_number(first), ensemble) for first, *ensemble in fields),
    )
    _check(outline)
    return LedgerMetadata(
        metadata_version=1,
        ensemble_size=outline.ensemble_size,
        write_quorum=outline.write_quorum,
        ack_quorum=outline.ack_quorum,
        state=outline.state,
        length=outline.length,
        last_entry_id=outline.last_entry_id,
        digest_type=None,
        password=None,
        segments=outline.segments,
        has_ack_quorum=False,
    )


def _lines(metadata: LedgerMetadata) -> Iterator[str]:
    """Yield the lines without line feeds. The last one is empty if the ledger is open."""
    assert metadata.ack_quorum == metadata.write_quorum, metadata
    assert metadata.password is None, metadata
    assert not metadata.custom, metadata
    yield str(metadata.write_quorum)
    yield str(metadata.ensemble_size)
    yield str(metadata.length)
    for segment in metadata.segments:
        yield "\t".join((str(segment.first_entry_id), *segment.ensemble))
    match metadata.state:
        case LedgerState.OPEN:
            yield ""
        case LedgerState.IN_RECOVERY:
            yield f"{_IN_RECOVERY}\tCLOSED"
        case LedgerState.CLOSED:
            yield f"{metadata.last_entry_id}\tCLOSED"


_NUMBER = re.compile(r"-?[0-9]{1,19}")


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
        raise CorruptionError("not a number in ledger metadata", text=text[:80])
    return int(text)


# --- Checks for every version ---------------------------------------------------------------------


def _segment(first_entry_id: int, ensemble: Sequence[str], unknown_fields: bytes = b"") -> Segment:
    if first_entry_id < 0:
        raise CorruptionError("a segment begins below 0", first_entry_id=first_entry_id)
    return Segment(
        first_entry_id=first_entry_id,
        ensemble=tuple(map(parse_bookie_id, ensemble)),
        unknown_fields=unknown_fields,
    )


def _check(ledger: LedgerOutline) -> None:
    """Raise CorruptionError if these values contradict each other."""
    segments, ensemble_size = ledger.segments, ledger.ensemble_size
    if not max(1, ledger.ack_quorum) <= ledger.write_quorum <= ensemble_size:
        raise CorruptionError(
            "impossible quorums",
            ensemble_size=ensemble_size,
            write_quorum=ledger.write_quorum,
            ack_quorum=ledger.ack_quorum,
        )
    for segment in segments:
        if len(segment.ensemble) != ensemble_size:
            raise CorruptionError(
                "an ensemble of another size",
                first_entry_id=segment.first_entry_id,
                bookie_count=len(segment.ensemble),
                ensemble_size=ensemble_size,
            )
    if not segments:
        raise CorruptionError("ledger metadata without a segment")
    starts = [segment.first_entry_id for segment in segments]
    if starts[0] != 0 or (
        len(starts) > 1 and any(here >= after for here, after in pairwise(starts))
    ):
        raise CorruptionError("segments do not ascend from entry 0", first_entry_ids=starts[:20])
    if ledger.last_entry_id < LAC_NONE:
        raise CorruptionError("the last entry id is below -1", last_entry_id=ledger.last_entry_id)
    if max(ledger.last_entry_id, starts[-1]) > LAST_ENTRY_MAX:
        raise CorruptionError(
            "the last entry id is impossibly high",
            last_entry_id=ledger.last_entry_id,
            last_segment_from=starts[-1],
        )


def may_name(data: bytes, bookie: BookieId) -> bool:
    """Return True if metadata that cannot be parsed may name the bookie. That the bytes do not
    contain the id proves nothing: they may be cut short. ``named_bookies`` must prove it."""
    if bookie.encode() in data:  # every format contains ids as plain text
        return True
    named = named_bookies(data)
    return named is None or bookie in named


def named_bookies(data: bytes) -> frozenset[BookieId] | None:
    """Return all bookies that the ensembles name; None if that cannot be proven. Only a record with
    its own length can be proven complete: version 3, and later ones of the same structure. Its
    ensembles must be valid; other values need not be known."""
    try:
        version, body = split_version(data)
        if version < 3:
            return None
        message = parse_binary(undelimited(body), LedgerMetadataFormat)
        ensembles = [[parse_bookie_id(b) for b in each.ensembleMember] for each in message.segment]
    except CorruptionError:
        return None
    starts = [segment.firstEntryId for segment in message.segment]
    ascend = starts[:1] == [0] and all(here < after for here, after in pairwise(starts))
    are_full = all(len(ensemble) == message.ensembleSize > 0 for ensemble in ensembles)
    if not (ascend and are_full):
        return None
    return frozenset(bookie for ensemble in ensembles for bookie in ensemble)
