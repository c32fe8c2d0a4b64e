"""Entries of the log and pages of bases."""

import zlib

import pytest

from checkpoints.codec import (
    PAGE_LEDGERS_MAX,
    CheckpointDecoder,
    completes_checkpoint,
    cut_checkpoints,
    decode_page,
    encode_checkpoint,
    encode_page,
)
from checkpoints.model import Checkpoint, Span, ledger_key
from ledgers.errors import CorruptionError


def span(ledger_id: int, end: int) -> Span:
    return Span(ledger_key(ledger_id), end - 1, end, None if ledger_id % 7 == 0 else 2**64 - 1)


def test_a_checkpoint_is_decoded_as_it_was_encoded() -> None:
    checkpoint = Checkpoint(20, 10, 123, [span(i, 11 + i) for i in range(9)])

    (entry,) = encode_checkpoint(checkpoint)

    assert CheckpointDecoder().decode(entry) == checkpoint
    assert completes_checkpoint(entry)


def test_the_parts_of_a_large_checkpoint_are_joined() -> None:
    checkpoint = Checkpoint(20, 10, 123, [span(i, 20) for i in range(9)])
    decoder = CheckpointDecoder()

    decoded = [decoder.decode(entry) for entry in encode_checkpoint(checkpoint, spans_max=4)]

    assert decoded == [None, None, checkpoint]


def test_an_empty_entry_has_no_checkpoint() -> None:
    assert CheckpointDecoder().decode(b"") is None
    assert decode_page(b"") is None


@pytest.mark.parametrize("payload", [b"\x09abc", b"\x01\xff", b"\x01"])
def test_an_unreadable_entry_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptionError):
        CheckpointDecoder().decode(payload)


BOMB = b"\x03" + zlib.compress(bytes(2 * 8 * PAGE_LEDGERS_MAX + 16))


@pytest.mark.parametrize("payload", [b"\x09abc", b"\x03abc", encode_page([1], [2])[:-3], BOMB])
def test_an_unreadable_page_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_page(payload)


def test_a_page_is_decoded_as_it_was_encoded() -> None:
    decoded = decode_page(encode_page([1, 2, 2**62], [5, 2**62, 7]))

    assert decoded is not None
    assert [list(part) for part in decoded] == [[1, 2, 2**62], [5, 2**62, 7]]


def test_checkpoints_are_cut_between_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.codec.SPANS_MAX", 3)
    spans = [span(i, end) for i, end in enumerate([11, 12, 13, 13, 13, 14, 15, 16])]

    cut = list(cut_checkpoints(spans, previous_id=10, last_id=19, time_ms=1))

    assert [(c.previous_id, c.id, len(c.spans)) for c in cut] == [(10, 13, 5), (13, 19, 3)]
