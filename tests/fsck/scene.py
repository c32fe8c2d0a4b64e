"""A cluster with one ledger of each kind of damage, among healthy ledgers of Java's client.

Two bookies are damaged as a whole: the entry logs of one are truncated, and one is wiped except for
its cookie. Ledgers that name one of them miss a copy; ledgers that name both have one left.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from daemon.admin_session import admin_session
from daemon.local.cluster import LocalCluster
from daemon.settings import Settings
from ledgers.digest import EntryDigest
from ledgers.model import BookieId, LedgerMetadata
from ledgers.store import ANY_VERSION
from tests.fsck.damage import Copy, cut_entry_logs, stopped, storage, wipe_but_identity
from tests.fsck.kinds import ENTRY_COUNT, KINDS, CopyDamage, Kind, Told
from tests.fsck.running import options, run, told
from tests.java import messages
from tests.java.tool import JavaTool

BOOKIES = 6
LEDGERS = 240
"""A fifth of these ledgers names neither of the two bookies."""
SHAPE = messages.Shape(count=LEDGERS, entries=ENTRY_COUNT, ack_quorum=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """``damaged``: the damage of each ledger. ``others``: what the two bookies lost."""

    damaged: Mapping[int, Kind]
    others: Mapping[int, frozenset[Finding]]

    @property
    def ledger_ids(self) -> Sequence[int]:
        return sorted([*self.damaged, *self.others])

    def expected(self, level: Level) -> dict[int, Told]:
        """Return the expected verdict of each ledger."""
        told = {ledger_id: kind.told(level) for ledger_id, kind in self.damaged.items()}
        return told | {
            ledger_id: _told_of_other(lost, level) for ledger_id, lost in self.others.items()
        }


def _told_of_other(lost: frozenset[Finding], level: Level) -> Told:
    if not lost or level is Level.METADATA:
        return Told()
    grade = Grade.DEGRADED if len(lost) == 1 else Grade.AT_RISK
    return Told(grade=grade, findings=tuple(each for each in Finding if each in lost))


def make_scene(cluster: LocalCluster, java: JavaTool) -> Scene:
    """Create the scene on a cluster of ``BOOKIES`` without ledgers, in about half a minute.

    All bookies run afterwards.
    """
    uri = cluster.metadata_service_uri
    ledger_ids = asyncio.run(_whole(uri, [each.ledger for each in java.write(uri, SHAPE)]))
    metadata = asyncio.run(_read_metadata(uri, ledger_ids))
    cut, wiped, *_ = cluster.bookies
    losses = {cut: Finding.READ_ERROR, wiped: Finding.MISSING}
    lost = {
        i: frozenset(losses[bookie] for bookie in metadata[i].bookies if bookie in losses)
        for i in ledger_ids
    }
    untouched = [i for i in ledger_ids if not lost[i]]
    assert len(untouched) >= len(KINDS), "too few ledgers name neither of the two bookies"
    damaged = dict(zip(untouched, KINDS, strict=False))
    with stopped(cluster, cluster.bookies):
        cut_entry_logs(storage(cluster, cut))
        wipe_but_identity(storage(cluster, wiped))
        for ledger_id, kind in damaged.items():
            if isinstance(kind, CopyDamage):
                _damage_copies(cluster, ledger_id, metadata[ledger_id], kind)
    asyncio.run(_damage_metadata(uri, damaged, cluster.bookies))
    others = {i: lost[i] for i in ledger_ids if i not in damaged}
    return Scene(damaged=damaged, others=others)


async def _whole(uri: str, ledger_ids: Sequence[int]) -> list[int]:
    """Return the ledgers with all copies, and delete the others, so that no run of fsck sees them.

    Some may lack a copy for good: Java's client closes a ledger when two of three bookies have
    stored each entry, and may end before the third request is sent.
    """
    verdicts = await run(options(uri, Level.FULL), ledger_ids)
    whole = [each for each in ledger_ids if told(verdicts[each]) == Told()]
    assert len(whole) > 0.9 * len(ledger_ids), f"only {len(whole)} of {len(ledger_ids)} are whole"
    async with admin_session(Settings(metadata_service_uri=uri)) as seen:
        for each in set(ledger_ids).difference(whole):
            await seen.manager.delete(each, version=ANY_VERSION)
    return whole


async def _read_metadata(uri: str, ledger_ids: Sequence[int]) -> dict[int, LedgerMetadata]:
    async with admin_session(Settings(metadata_service_uri=uri)) as seen:
        return {each: (await seen.manager.read(each)).metadata for each in ledger_ids}


def _damage_copies(
    cluster: LocalCluster, ledger_id: int, metadata: LedgerMetadata, kind: CopyDamage
) -> None:
    assert metadata.password is not None, metadata
    assert metadata.digest_type is not None, metadata
    digest = EntryDigest(metadata.digest_type, metadata.password)
    (segment,) = metadata.segments
    for index in kind.copies:
        files = storage(cluster, segment.ensemble[index])
        kind.how(Copy(files=files, ledger_id=ledger_id, digest=digest), kind.at(ledger_id))


async def _damage_metadata(
    uri: str, damaged: Mapping[int, Kind], bookies: Sequence[BookieId]
) -> None:
    async with admin_session(Settings(metadata_service_uri=uri)) as seen:
        for ledger_id, kind in damaged.items():
            if kind.change is None:
                continue
            versioned = await seen.manager.read(ledger_id)
            others = frozenset(bookies) - versioned.metadata.bookies
            data = kind.change(versioned, others)
            assert data != versioned.data, kind
            await seen.store.set(seen.manager.path(ledger_id), data, version=versioned.version)
