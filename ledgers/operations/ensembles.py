"""The bookies that a ledger is being written to, and who takes over from those that fail."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from ledgers.clock import Clock
from ledgers.errors import BookmenderError, NotEnoughBookiesError, UnavailableError
from ledgers.metadata import BookieId, LedgerMetadata, Segment
from ledgers.placement import Candidate, PlacementPolicy
from ledgers.striping import covers

FAILED_BOOKIE_REST_S = 60.0
"""For so long a bookie that failed takes over nothing more of the ledger."""

WritableBookies = Callable[[], Awaitable[Collection[Candidate]]]
"""The bookies that may be chosen now: writable, and neither drained nor under maintenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookiePool:
    """What ensembles and their replacements are chosen from: who is there, and who of them is
    best."""

    writable: WritableBookies
    placement: PlacementPolicy


def with_ensemble(metadata: LedgerMetadata, segment: Segment) -> LedgerMetadata:
    """The metadata with ``segment``'s ensemble as the current one, from its first entry on."""
    last = metadata.last_segment
    if segment.first_entry_id == last.first_entry_id:
        segment = replace(last, ensemble=segment.ensemble)  # whatever else it says is kept
    return metadata.with_segment(segment)


async def can_go_on_without(
    metadata: LedgerMetadata, failed: Collection[BookieId], *, pool: BookiePool, clock: Clock
) -> bool:
    """Whether entries could be added to the last segment though these bookies fail: others would
    take over, or an ack quorum of every write set is left."""
    ensemble = CurrentEnsemble(metadata, pool=pool, clock=clock)
    for index, bookie in enumerate(ensemble.bookies):
        if bookie in failed:
            ensemble.note_failure(index, bookie, UnavailableError("no answer"))
    ensemble.install(await ensemble.choose())
    return not ensemble.is_broken


class CurrentEnsemble:
    """The ensemble that a ledger is being written to, and its failures.

    A bookie for which no replacement is to be had keeps its place, as one of the ``dead``: nothing
    more is sent to it, and each further failure tries anew to replace it too.
    """

    def __init__(self, metadata: LedgerMetadata, *, pool: BookiePool, clock: Clock) -> None:
        self.bookies = metadata.last_segment.ensemble
        self.dead: frozenset[int] = frozenset()
        self._metadata = metadata
        self._pool, self._clock = pool, clock
        self._failed: set[int] = set()
        self._failures: dict[BookieId, tuple[float, BookmenderError]] = {}

    @property
    def has_failures(self) -> bool:
        """Whether a bookie failed that was neither replaced nor given up."""
        return bool(self._failed)

    @property
    def is_broken(self) -> bool:
        """Whether some write set has fewer than A bookies left that are not dead."""
        size, write_quorum = self._metadata.ensemble_size, self._metadata.write_quorum
        return not covers(
            frozenset(range(size)) - self.dead,
            ensemble_size=size,
            write_quorum=write_quorum,
            # At most W - A of a write set may be dead.
            ack_quorum=write_quorum - self._metadata.ack_quorum + 1,
        )

    @property
    def failures(self) -> str:
        """Which bookie failed of what, for an error's message."""
        return "; ".join(f"{bookie}: {error}" for bookie, (_, error) in self._failures.items())

    def note_failure(self, index: int, bookie: BookieId, error: BookmenderError) -> None:
        """``bookie`` failed at ``index``. Of no consequence once it was replaced or given up
        there."""
        if self.bookies[index] == bookie and index not in self.dead:
            self._failed.add(index)
            self._failures[bookie] = (self._clock.now_s(), error)

    async def choose(self) -> "EnsembleChange":
        """Choose who is to take over from the failed and the dead, as far as there is anybody."""
        candidates = await self._pool.writable()
        wanted = self.dead | self._failed
        excluded = self._resting().union(self.bookies)
        chosen = list(self.bookies)
        for index in sorted(wanted):
            try:
                chosen[index] = self._pool.placement.choose_replacement(
                    candidates,
                    ensemble=chosen,
                    index=index,
                    write_quorum=self._metadata.write_quorum,
                    ack_quorum=self._metadata.ack_quorum,
                    excluded=excluded,
                )
            except NotEnoughBookiesError:
                continue
        replaced = frozenset(i for i in wanted if chosen[i] != self.bookies[i])
        return EnsembleChange(bookies=tuple(chosen), replaced=replaced, given_up=wanted - replaced)

    def install(self, change: "EnsembleChange") -> None:
        """Go on with these bookies. Who failed since ``choose`` stays noted."""
        self.bookies = change.bookies
        self.dead = change.given_up
        self._failed -= change.replaced | change.given_up

    def _resting(self) -> frozenset[BookieId]:
        since_s = self._clock.now_s() - FAILED_BOOKIE_REST_S
        return frozenset(
            bookie for bookie, (failed_at_s, _) in self._failures.items() if failed_at_s >= since_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleChange:
    """A new ensemble: the bookie indexes that got another bookie, and those that keep a failed
    one."""

    bookies: tuple[BookieId, ...]
    replaced: frozenset[int]
    given_up: frozenset[int]
