"""How checkpoints and bases are stored in entries of ledgers.

The first byte of an entry is its kind:

- CHECKPOINT: a checkpoint, or the last part of one.
- PART: a part of a checkpoint that continues in the next entry. A checkpoint has parts only if too
  many of its spans have the same version. Without its last part it was never committed.
- PAGE: a page of a base: ledger ids, ascending, and their versions.

An empty entry has no content. A writer adds it to confirm the entry before it: readers see entries
only up to the LAC that a later entry carries.

The rest of a checkpoint is msgpack, with structs as arrays. A page is two compressed arrays of
64-bit integers.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from checkpoints.model import Checkpoint, CheckpointId, Span
from ledgers.errors import CorruptionError

CHECKPOINT: Final = 1
PART: Final = 2
PAGE: Final = 3

SPANS_MAX = 8_000
"""Spans in one entry. They take about 300 KB."""
PAGE_LEDGERS_MAX = 16_384
"""Ledgers in one page. They take at most 256 KB."""
_WORD = "q"
_WORD_BYTES = array(_WORD).itemsize
_PAGE_BYTES_MAX = 2 * _WORD_BYTES * PAGE_LEDGERS_MAX
_COMPRESSION_LEVEL = 1

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Checkpoint)


def encode_checkpoint(checkpoint: Checkpoint, *, spans_max: int = SPANS_MAX) -> list[bytes]:
    """Return the entries of a checkpoint, nearly always one."""
    spans = checkpoint.spans
    parts = [spans[start : start + spans_max] for start in range(0, len(spans), spans_max)] or [()]
    entries = []
    for number, part in enumerate(parts, start=1):
        kind = CHECKPOINT if number == len(parts) else PART
        whole = Checkpoint(checkpoint.id, checkpoint.previous_id, checkpoint.time_ms, part)
        entries.append(bytes((kind,)) + _encoder.encode(whole))
    return entries


class CheckpointDecoder:
    """Decodes the entries of one ledger, in order, and joins the parts of checkpoints."""

    def __init__(self) -> None:
        self._parts: list[Span] = []

    def decode(self, payload: bytes) -> Checkpoint | None:
        """Return the checkpoint that this entry completes; None if it completes none. Raises
        CorruptionError."""
        if not payload:
            return None
        kind = payload[0]
        if kind not in (CHECKPOINT, PART):
            raise CorruptionError(
                "not an entry of the feed's log that this release reads", kind=kind
            )
        try:
            checkpoint = _decoder.decode(memoryview(payload)[1:])
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"an unreadable checkpoint: {error}") from error
        if kind == PART:
            self._parts += checkpoint.spans
            return None
        if self._parts:
            spans = [*self._parts, *checkpoint.spans]
            self._parts = []
            checkpoint = Checkpoint(
                checkpoint.id, checkpoint.previous_id, checkpoint.time_ms, spans
            )
        return checkpoint


def completes_checkpoint(payload: bytes) -> bool:
    """True if the entry is a checkpoint or its last part."""
    return payload[:1] == bytes((CHECKPOINT,))


def encode_page(ledger_ids: Sequence[int], versions: Sequence[int]) -> bytes:
    """Return a page of a base. ``ledger_ids``: ascending."""
    assert len(ledger_ids) == len(versions) <= PAGE_LEDGERS_MAX, len(ledger_ids)
    words = array(_WORD, ledger_ids)
    words.extend(versions)
    if sys.byteorder == "big":
        words.byteswap()
    return bytes((PAGE,)) + zlib.compress(words.tobytes(), _COMPRESSION_LEVEL)


def decode_page(payload: bytes) -> tuple[array[int], array[int]] | None:
    """Return ledger ids and versions; None for an empty entry. Raises CorruptionError."""
    if not payload:
        return None
    words = array(_WORD)
    try:
        if payload[0] != PAGE:
            raise CorruptionError("not a page that this release reads", kind=payload[0])
        inflater = zlib.decompressobj()
        words.frombytes(inflater.decompress(memoryview(payload)[1:], _PAGE_BYTES_MAX))
        if not inflater.eof:
            raise CorruptionError("a page of a base that is cut short, or too large")
    except (zlib.error, ValueError) as error:
        raise CorruptionError(f"an unreadable page of a base: {error}") from error
    if len(words) % 2:
        raise CorruptionError("a page with an id that has no version")
    if sys.byteorder == "big":
        words.byteswap()
    middle = len(words) // 2
    return words[:middle], words[middle:]


def cut_checkpoints(
    spans: Iterable[Span], *, previous_id: CheckpointId, last_id: CheckpointId, time_ms: int
) -> Iterator[Checkpoint]:
    """Yield checkpoints of bounded size that cover everything up to ``last_id``.

    ``spans``: in the order of their ends, all of them after ``previous_id`` and not after
    ``last_id``. A checkpoint ends where the next span has another version, because ids ascend and
    each checkpoint covers all changes up to its id.
    """
    part: list[Span] = []
    for span in spans:
        if len(part) >= SPANS_MAX and span.end > part[-1].end:
            checkpoint_id = part[-1].end
            yield Checkpoint(checkpoint_id, previous_id, time_ms, part)
            previous_id, part = checkpoint_id, []
        part.append(span)
    if part:
        yield Checkpoint(last_id, previous_id, time_ms, part)
