"""Metadata over the space of its fields: Java's serializer and parser, and ours."""

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.java import Java
from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.codec.metadata import parse_metadata, parse_outline, serialize_metadata
from ledgers.codec.protobuf import format_text
from ledgers.errors import CorruptionError
from ledgers.model import LedgerMetadata, outline_of
from tests.java import messages
from tests.java.jvm import java_command

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("java")]
pytest_plugins = ["tests.java.fixtures"]

SEED, COUNT = 38, 1_000
STRICTER = {
    "impossible quorums": "an ensemble or write quorum below 1",
    "without its last entry id": "Java assumes 0",
    "unknown value": "of an enum: Java 4.18 drops it at a rewrite",
    "not the text of": "an unknown field in version 2: Java 4.18 drops it at a rewrite",
    "lacks length": "in version 2, of a ledger that is not closed",
}
"""What we refuse although Java may accept it (``ledgers.codec.metadata``)."""
LENIENT = "digestType"
"""Named by the error with which Java refuses a password without a digest type. We keep both."""


def ask_java(
    tmp_path: Path, *, count: int = 0, read: Sequence[bytes] = ()
) -> list[messages.AnyRecord]:
    """Return ``count`` metadata that Java makes, and what Java reads in these bytes."""
    program = ("bookmender.MetadataSpace", str(SEED), str(count))
    done = subprocess.run(
        java_command(BOOKKEEPER_DEFAULT, Java.find(), temporary=tmp_path, program=program),
        input=b"".join(data.hex().encode() + b"\n" for data in read),
        capture_output=True,
        check=True,
        timeout=120,
    )
    return [messages.decode(line) for line in done.stdout.splitlines()]


def assert_same(ours: LedgerMetadata, of_java: messages.Metadata) -> None:
    digest = ours.digest_type.name.replace("HMAC", "MAC") if ours.digest_type else None
    assert (
        *(ours.metadata_version, ours.ensemble_size, ours.write_quorum, ours.ack_quorum),
        *(ours.state.name, ours.length, ours.last_entry_id),
        *(ours.password, digest if ours.password is not None else None),
        *(ours.ctime_ms if ours.ctime_ms is not None else -1, dict(ours.custom)),
        {each.first_entry_id: each.ensemble for each in ours.segments},
    ) == (
        *(of_java.metadata_version, of_java.ensemble_size, of_java.write_quorum),
        *(of_java.ack_quorum, of_java.state, of_java.length, of_java.last),
        None if of_java.password is None else bytes.fromhex(of_java.password),
        of_java.digest,
        of_java.ctime,
        {key: bytes.fromhex(value) for key, value in of_java.custom.items()},
        of_java.ensembles,
    )


@pytest.mark.compat(
    "TestLedgerMetadataSerDe.testVersion1SerDe",
    "TestLedgerMetadataSerDe.testVersion2SerDe",
    "TestLedgerMetadataSerDe.testVersion2CtimeSerDe",
    "TestLedgerMetadataSerDe.testVersion3SerDe",
    verdict="same",
)
def test_whatever_java_writes_is_read_and_written_again_as_it_is(tmp_path: Path) -> None:
    made = ask_java(tmp_path, count=COUNT)

    assert len(made) == COUNT
    for record in made:
        assert isinstance(record, messages.Metadata)
        data = bytes.fromhex(record.serialized)
        ours = parse_metadata(data)
        if record.metadata_version == 1 or ours.ctime_ms is None:
            record = replace(record, ctime=-1)  # not stored
        assert_same(ours, record)
        assert serialize_metadata(ours) == data
        assert parse_outline(data) == outline_of(ours)


def any_message(rng: random.Random) -> bytes:
    """Return metadata of version 2 or 3, with fields missing, unknown, or of other values."""
    size = rng.choice((0, 1, 2, 3))
    message = LedgerMetadataFormat(
        quorumSize=rng.choice((-1, 0, 1, size, size + 1)),
        ensembleSize=rng.choice((size, size, size, size + 1)),
        ackQuorumSize=rng.choice((-1, 0, 1, size, size + 1)),
        length=rng.choice((0, 10)),
        lastEntryId=rng.choice((-1, 9)),
        state=LedgerMetadataFormat.State.ValueType(rng.choice((1, 2, 3))),
        digestType=LedgerMetadataFormat.DigestType.ValueType(rng.choice((1, 2, 3, 4))),
        password=rng.choice((b"", b"secret")),
        ctime=rng.choice((0, 1)),
        cToken=rng.choice((0, 1)),
    )
    for number in range(rng.choice((0, 1, 1, 1, 2))):
        message.segment.add(
            firstEntryId=5 * number, ensembleMember=[f"bookie-{i}:3181" for i in range(size)]
        )
    for field in rng.sample(OFTEN_MISSING, rng.choice((0, 0, 1, 2))):
        message.ClearField(field)  # type: ignore[arg-type]  # any name
    if rng.random() < 0.5:
        text = format_text(message)
        return HEADER % 2 + text + rng.choice((b"", b"", b"other: 1\n"))
    body = message.SerializePartialToString() + rng.choice((b"", b"", UNKNOWN, b"\x38\x09"))
    return HEADER % 3 + bytes((len(body) & 0x7F | 0x80, len(body) >> 7)) + body


HEADER = b"BookieMetadataFormatVersion\t%d\n"
UNKNOWN = bytes.fromhex("a20603616263f80605")
"""Field 100, three bytes, and field 111, a varint."""
OFTEN_MISSING = [field.name for field in LedgerMetadataFormat.DESCRIPTOR.fields]


@pytest.mark.compat("TestLedgerMetadataSerDe.testJunk2SerDe", verdict="same")
def test_other_fields_are_read_and_refused_as_by_java(tmp_path: Path) -> None:
    """Fields are missing, unknown or have other values. The exceptions are in ``STRICTER``."""
    rng = random.Random(SEED)
    cases = [any_message(rng) for _ in range(COUNT)]

    answers = ask_java(tmp_path, read=cases)

    for data, answer in zip(cases, answers, strict=True):
        ours, refusal = parsed(data)
        if ours is None:
            is_stricter = any(text in refusal for text in STRICTER)
            assert is_stricter or isinstance(answer, messages.Failure), (data, refusal, answer)
            if isinstance(answer, messages.Metadata) and "quorums" in refusal:
                assert answer.write_quorum < 1, data
        elif isinstance(answer, messages.Failure):
            assert LENIENT in answer.error, (data, answer)
        else:
            assert isinstance(answer, messages.Metadata), answer
            assert_same(ours, answer)


def parsed(data: bytes) -> tuple[LedgerMetadata | None, str]:
    """Return the metadata, or why it is refused."""
    try:
        return parse_metadata(data), ""
    except CorruptionError as error:
        return None, str(error)
