"""Creating a ledger: its bookies, its id, its znode."""

from dataclasses import dataclass
from random import Random

from ledgers.clock import Clock
from ledgers.errors import (
    NodeExistsError,
    NoSuchLedgerError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.metadata import DigestType, LedgerMetadata, Segment
from ledgers.operations.ensembles import BookiePool

TRIES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """What a new ledger is to be like.

    ``metadata_version``: 2 or 3. ``has_ctime``: whether the metadata tells when it was created
    (BookKeeper's ``storeSystemTimeAsLedgerCreationTime``).
    """

    ensemble_size: int = 3
    write_quorum: int = 2
    ack_quorum: int = 2
    digest_type: DigestType = DigestType.CRC32C
    password: bytes = b""
    custom: tuple[tuple[str, bytes], ...] = ()
    metadata_version: int = 3
    has_ctime: bool = False

    def __post_init__(self) -> None:
        assert self.metadata_version in (2, 3), self


async def create_ledger(
    options: LedgerOptions,
    *,
    manager: LedgerManager,
    pool: BookiePool,
    clock: Clock,
    random: Random,
    ledger_id: int | None = None,
) -> VersionedMetadata:
    """Make an open ledger without entries. ``ledger_id`` None: the cluster's next free one.

    Raises NotEnoughBookiesError; NodeExistsError when the id that was asked for is taken.
    """
    metadata = await _metadata(options, pool=pool, clock=clock, random=random)
    for _ in range(TRIES_MAX):
        candidate_id = await manager.new_ledger_id() if ledger_id is None else ledger_id
        try:
            return await manager.create(candidate_id, metadata)
        except (NodeExistsError, UnknownOutcomeError) as error:
            ours = await _ours(candidate_id, metadata, manager)
            if ours is not None:
                return ours
            if ledger_id is not None and isinstance(error, NodeExistsError):
                raise
    raise UnavailableError("no free ledger id was found", attempts=TRIES_MAX)


async def _metadata(
    options: LedgerOptions, *, pool: BookiePool, clock: Clock, random: Random
) -> LedgerMetadata:
    ensemble = pool.placement.choose_ensemble(
        await pool.writable(),
        options.ensemble_size,
        write_quorum=options.write_quorum,
        ack_quorum=options.ack_quorum,
    )
    return LedgerMetadata(
        metadata_version=options.metadata_version,
        ensemble_size=options.ensemble_size,
        write_quorum=options.write_quorum,
        ack_quorum=options.ack_quorum,
        digest_type=options.digest_type,
        password=options.password,
        ctime_ms=clock.wall_ms() if options.has_ctime else None,
        c_token=random.getrandbits(63) if options.metadata_version == 3 else None,
        custom=options.custom,
        segments=(Segment(first_entry_id=0, ensemble=ensemble),),
    )


async def _ours(
    ledger_id: int, metadata: LedgerMetadata, manager: LedgerManager
) -> VersionedMetadata | None:
    """The ledger, if it is the one that we made with a create whose reply was lost."""
    if metadata.c_token is None:
        return None
    try:
        found = await manager.read(ledger_id)
    except NoSuchLedgerError:
        return None
    return found if found.metadata.c_token == metadata.c_token else None
