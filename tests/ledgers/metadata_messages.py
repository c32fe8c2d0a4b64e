"""The bytes of ledger metadata: golden ones of Java's, and messages made for a test."""

from typing import Any

from ledgers.codec.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from tests.vectors import Case, cases

GOLDEN = cases("ledger_metadata")
HEADER = b"BookieMetadataFormatVersion\t%d\n"


def name_of(case: Case) -> str:
    name: str = case["name"]
    return name


def closed_message(**changes: Any) -> LedgerMetadataFormat:
    """Return a closed ledger's message, with fields set to other values, or cleared by None."""
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


def binary(body: bytes) -> bytes:
    assert len(body) < 128
    return HEADER % 3 + bytes([len(body)]) + body


def binary_of(message: LedgerMetadataFormat) -> bytes:
    return binary(message.SerializePartialToString())
