"""Which bookies may hold copies of a ledger that Pulsar isolates: those of its groups
(IsolatedBookieEnsemblePlacementPolicy).

The groups stand in Pulsar's znode of racks. A failed read is reported once; the last good groups
stay in force.
"""

from collections.abc import Collection, Mapping
from contextlib import aclosing

import structlog

from ledgers.clock import Clock
from ledgers.errors import BookmenderError, NoNodeError, SessionLostError, UnauthorizedError
from ledgers.formats.pulsar_isolation import Isolation, isolation_of
from ledgers.formats.pulsar_racks import PULSAR_RACKS_PATH, parse_pulsar_groups
from ledgers.metadata import BookieId, LedgerMetadata
from ledgers.store import MetadataStore

log = structlog.get_logger()

RETRY_S = 10.0
"""How long after a read in vain the znode is read again."""

REFUSED_S = 300.0
"""How long it is left alone after ACLs shut it away."""

Groups = Mapping[str, frozenset[BookieId]]


def bookies_within(
    isolation: Isolation, groups: Groups, writable: Collection[BookieId], *, ensemble_size: int
) -> frozenset[BookieId]:
    """Those of the primary groups; where fewer of them than the ensemble has are writable, of the
    secondary, too; where still fewer are, those of no group as well. Those of other groups alone
    are never among them."""
    within = _members(isolation.primary, groups)
    for more in (
        _members(isolation.secondary, groups),
        frozenset(writable) - _members(groups, groups),
    ):
        if len(within.intersection(writable)) >= ensemble_size:
            break
        within |= more
    return within


def _members(names: Collection[str], groups: Groups) -> frozenset[BookieId]:
    return frozenset().union(*(groups.get(name, frozenset()) for name in names))


class IsolationGroups:
    """The groups as they were last read. ``run`` keeps them fresh.

    ``may_leave``: whether copies go elsewhere where no other bookie of the groups is writable.
    """

    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        *,
        path: str = PULSAR_RACKS_PATH,
        may_leave: bool = False,
    ) -> None:
        self._store, self._clock, self._path = store, clock, path
        self._may_leave = may_leave
        self._groups: Groups = {}
        self._is_broken = False

    def allowed(
        self, metadata: LedgerMetadata, writable: Collection[BookieId]
    ) -> frozenset[BookieId] | None:
        """Who may receive copies of the ledger; None: whoever may. That is so without a znode of
        groups, as in Pulsar: a ledger that stays short of copies would be worse off."""
        isolation = isolation_of(metadata)
        if isolation is None or not self._groups:
            return None
        within = bookies_within(
            isolation, self._groups, writable, ensemble_size=metadata.ensemble_size
        )
        if self._may_leave and not within.intersection(writable) - metadata.bookies:
            return None
        return within

    async def run(self) -> None:
        """Read them again whenever they have changed, until cancelled."""
        while True:
            try:
                await self._follow()
            except UnauthorizedError as error:  # ACLs that refuse the watch, too, end no session
                self._tell_broken(error)
            await self._clock.sleep(REFUSED_S)

    async def _follow(self) -> None:
        async with aclosing(self._store.watch(self._path)) as events:
            async for _ in events:
                while not await self.refresh():
                    await self._clock.sleep(RETRY_S)

    async def refresh(self) -> bool:
        """False when that was in vain."""
        try:
            data, _ = await self._store.get(self._path)
            self._groups = parse_pulsar_groups(data)
        except NoNodeError:
            self._groups = {}
        except SessionLostError:
            raise
        except BookmenderError as error:
            self._tell_broken(error)
            return False
        self._is_broken = False
        return True

    def _tell_broken(self, error: BookmenderError) -> None:
        if not self._is_broken:  # told once, not at each try
            log.error("isolation.unreadable", path=self._path, error=str(error))
        self._is_broken = True


def anywhere(
    metadata: LedgerMetadata, writable: Collection[BookieId]
) -> frozenset[BookieId] | None:
    """``IsolationGroups.allowed`` where nobody is isolated."""
    return None
