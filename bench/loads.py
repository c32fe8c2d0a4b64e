"""The ledgers that lose a bookie: the same ones for every contender.

Ensembles use the bookies in turn, so each contender loses exactly as much.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ledgers.digest import HEADER_BYTES, EntryDigest
from ledgers.model import BookieId, DigestType, LedgerMetadata, Segment, entries_of

DIGEST = EntryDigest(DigestType.CRC32C, b"")
OVERHEAD_BYTES = HEADER_BYTES + DIGEST.size
VICTIM_INDEX = 2
"""Position of the bookie that is killed, among those of the cluster."""
QUICK_SHARE = 10
_NOISE = bytes(range(256)) * 258  # a little over 64 KiB: payloads are slices with different starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``ledger_count`` ledgers with the same shape. ``is_open``: their writers ended without
    closing them."""

    ledger_count: int
    entry_count: int
    payload_bytes: int = 1_024
    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    is_open: bool = False

    @property
    def entry_bytes(self) -> int:
        """The size of an entry as stored."""
        return OVERHEAD_BYTES + self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    title: str
    parts: tuple[Part, ...]

    def quick(self) -> "Load":
        """Return the same load at a tenth of its size."""
        return replace(self, parts=tuple(_tenth(part) for part in self.parts))

    def ledgers(self, bookies: Sequence[BookieId], *, first_ledger_id: int) -> list["BenchLedger"]:
        """Return the load's ledgers on these bookies, with successive ids."""
        alike = [(part, number) for part in self.parts for number in range(part.ledger_count)]
        return [
            BenchLedger(
                ledger_id=ledger_id,
                part=part,
                ensemble=_ensemble(bookies, start=number, size=part.ensemble_size),
            )
            for ledger_id, (part, number) in enumerate(alike, start=first_ledger_id)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLedger:
    """One ledger of a load: the place and the content of each entry."""

    ledger_id: int
    part: Part
    ensemble: tuple[BookieId, ...]

    def metadata(self) -> LedgerMetadata:
        part = self.part
        created = LedgerMetadata(
            ensemble_size=part.ensemble_size,
            write_quorum=part.write_quorum,
            ack_quorum=part.ack_quorum,
            digest_type=DigestType.CRC32C,
            segments=(Segment(first_entry_id=0, ensemble=self.ensemble),),
        )
        if part.is_open:
            return created
        length = part.entry_count * part.payload_bytes
        return created.closed(last_entry_id=part.entry_count - 1, length=length)

    def stripe(self, bookie: BookieId) -> Sequence[int]:
        """Return the entry ids that the bookie stores; none if it is not in the ensemble."""
        if bookie not in self.ensemble:
            return ()
        return entries_of(
            self.ensemble.index(bookie),
            first_entry_id=0,
            last_entry_id=self.part.entry_count - 1,
            ensemble_size=self.part.ensemble_size,
            write_quorum=self.part.write_quorum,
        )

    def entries(self, bookie: BookieId) -> Iterator[bytes]:
        """Yield the packed entries that the bookie stores."""
        payload_bytes = self.part.payload_bytes
        for entry_id in self.stripe(bookie):
            start = (self.ledger_id + entry_id) % 251
            yield DIGEST.pack(
                ledger_id=self.ledger_id,
                entry_id=entry_id,
                lac=entry_id - 1,
                length=(entry_id + 1) * payload_bytes,
                payload=_NOISE[start : start + payload_bytes],
            )


def stake(ledgers: Sequence[BenchLedger], victim: BookieId) -> dict[str, int]:
    """Return how much data the loss of a bookie affects, with open ledgers among the ledgers, and
    bytes as stored."""
    lost = [ledger for ledger in ledgers if victim in ledger.ensemble]
    return {
        "lost_ledgers": len(lost),
        "lost_open_ledgers": sum(ledger.part.is_open for ledger in lost),
        "lost_entries": sum(len(ledger.stripe(victim)) for ledger in lost),
        "lost_bytes": sum(len(each.stripe(victim)) * each.part.entry_bytes for each in lost),
    }


def _ensemble(bookies: Sequence[BookieId], *, start: int, size: int) -> tuple[BookieId, ...]:
    return tuple(bookies[(start + step) % len(bookies)] for step in range(size))


def _tenth(part: Part) -> Part:
    """Return a tenth of the ledgers if there are many, else a tenth of their entries."""
    if part.ledger_count >= QUICK_SHARE * 5:
        return replace(part, ledger_count=part.ledger_count // QUICK_SHARE)
    return replace(part, entry_count=max(1, part.entry_count // QUICK_SHARE))


def alike(name: str, title: str, ledger_count: int, entry_count: int, **shape: Any) -> Load:
    """Return a load whose ledgers all have the same shape."""
    part = Part(ledger_count=ledger_count, entry_count=entry_count)
    return Load(name=name, title=title, parts=(replace(part, **shape),))


BOOKIES_WARM_UP = Load(
    name="bookies-warm-up",
    title="enough for the bookies' compilers",
    parts=(
        Part(ledger_count=3_000, entry_count=10),
        Part(ledger_count=4, entry_count=10_000),
    ),
)
WARM_UP = Load(
    name="warm-up",
    title="a small loss, for a daemon that has just started",
    parts=(
        Part(ledger_count=300, entry_count=10),
        Part(ledger_count=2, entry_count=2_000),
    ),
)

LOADS: Mapping[str, Load] = {
    load.name: load
    for load in (
        alike("a", "2,000 ledgers of 10 × 1 KB, E3 W3", 2_000, 10),
        alike("b", "4 of 20,000 × 1 KB, E3 W3", 4, 20_000),
        alike("c", "4 of 20,000 × 1 KB, E4 W2", 4, 20_000, ensemble_size=4, write_quorum=2),
        alike("d", "20 of 200 × 64 KB, E3 W3", 20, 200, payload_bytes=65_536),
        alike("e", "1,000 empty ledgers, E3 W3", 1_000, 0),
        Load(
            name="f",
            title="mixed, 20 of them open",
            parts=(
                Part(ledger_count=600, entry_count=10),
                Part(ledger_count=200, entry_count=0),
                Part(ledger_count=5, entry_count=2_000, ensemble_size=4, write_quorum=2),
                Part(ledger_count=5, entry_count=50, payload_bytes=65_536, write_quorum=2),
                Part(
                    ledger_count=20, entry_count=20, ensemble_size=2, write_quorum=2, is_open=True
                ),
            ),
        ),
    )
}
