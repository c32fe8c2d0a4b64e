"""Notices that ZooKeeper was restored from a backup, and begins the feed again.

Everything in ZooKeeper is restored, so ZooKeeper cannot tell. Each node that stands for election
keeps on its disk which chain it read last. If the chain is older than this, the node replaces it by
a chain of a new generation, as an operator does with ``feed disable`` and ``feed enable``. Then the
leader writes a new feed, and all clients are told. The node need not be the leader, and the leader
may be of an earlier release.

What is older: a lower generation; in the same generation a lower version of the znode, or other
content of the same version; or the lack of a log ledger that had a checkpoint. Transaction ids
prove nothing here: they may go back, go on, or jump to the next epoch.

If the chain was not written between the backup and the restore, the log is as it was: it also has
what was published after the backup, and the leader publishes what differs from it.

A session may survive a restore, and with it what its node learnt before. So each session ends when
such a generation begins; the node opens another one.

The leader (``publisher``) and the clients (``client``) have evidence of their own.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import structlog

from checkpoints.chain import FeedChain
from checkpoints.model import LogId
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NoNodeError,
    RejectedError,
    SessionLostError,
    UnavailableError,
)
from ledgers.plain_files import replace_file
from ledgers.store import MetadataStore
from ledgers.tasks import in_daemon_thread, until_answered
from replication.records import Count, Record
from replication.znodes import ClusterPaths

log = structlog.get_logger()

NEXT_STEP = (
    "programs that follow the feed must compare their state with all ledgers; see what to do after "
    "a restore of ZooKeeper in docs/feed.md"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChain(Record):
    """The record that a node keeps of the chain that it read last.

    ``znode_version``: of the znode. ``digest``: of its content. ``log``: the last log ledger that
    is known to have a checkpoint, because the one after it begins later.
    """

    generation: Count
    znode_version: Count
    digest: str
    log: LogId | None = None

    @classmethod
    def of(cls, data: bytes, version: int) -> KnownChain:
        """``data``, ``version``: of the znode. Raises CorruptionError."""
        chain = FeedChain.parse(data)
        full = [a for a, b in pairwise(chain.logs) if a.previous_id < b.previous_id]
        return cls(
            generation=chain.generation,
            znode_version=version,
            digest=_digest(data),
            log=full[-1].log_id if full else None,
        )

    def contradiction(self, data: bytes, version: int) -> str | None:
        """Return why this chain must be from a backup; None if it may follow the known one."""
        chain = FeedChain.parse(data)
        if chain.generation != self.generation:
            is_older = chain.generation < self.generation
            return "the feed has an earlier generation" if is_older else None
        if version < self.znode_version:
            return "the feed's znode has an earlier version"
        if version == self.znode_version and _digest(data) != self.digest:
            return "the feed's znode has other content at the same version"
        return None if chain.knows(self.log) else "the feed's log lacks a ledger that it had"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


class KnownChains(Protocol):
    """Where a node keeps the chain that it knows."""

    async def read(self) -> KnownChain | None:
        """Return None if nothing can be read."""
        ...

    async def write(self, known: KnownChain) -> None: ...


class ChainFile:
    """``KnownChains`` in a file on the local disk."""

    def __init__(self, folder: Path, *, cluster: str) -> None:
        """``cluster``: its INSTANCEID."""
        self._file = folder / f"feed-{_digest(cluster.encode())}.json"
        self._has_failed = False
        """True if it was logged that the disk cannot be used."""

    async def read(self) -> KnownChain | None:
        return await in_daemon_thread(self._read)

    async def write(self, known: KnownChain) -> None:
        await in_daemon_thread(lambda: self._write(known))

    def _read(self) -> KnownChain | None:
        try:
            return KnownChain.parse(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, CorruptionError) as error:
            self._log_failure(error)
            return None

    def _write(self, known: KnownChain) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, known.to_json().decode())
        except OSError as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "feed.known_chain_unusable",
                file=str(self._file),
                error=str(error),
                next_step="grant this user write access, and free disk space",
            )


class RestoreWatch:
    """Compares the chain in ZooKeeper with the one that this node knows."""

    def __init__(
        self, store: MetadataStore, paths: ClusterPaths, disk: KnownChains, *, clock: Clock
    ) -> None:
        self._store, self._paths, self._disk, self._clock = store, paths, disk, clock
        self._generation: int | None = None
        """As it was read first in this session."""

    async def run(self) -> None:
        """Compare whenever the chain changes, until cancelled. Raises SessionLostError, also when
        the feed begins again after a restore."""
        async with aclosing(self._store.watch(self._paths.feed)) as events:
            async for _ in events:
                await until_answered(
                    self.run_once,
                    event="feed.read_failed",
                    clock=self._clock,
                    errors=(UnavailableError, RejectedError),
                )

    async def run_once(self) -> None:
        await self._store.sync(self._paths.feed)  # the server of this session may lag
        known = await self._disk.read()
        try:
            data, stat = await self._store.get(self._paths.feed)
            version = stat.version
            chain = FeedChain.parse(data)
            self._generation = self._generation or chain.generation
            because = None if known is None else known.contradiction(data, version)
            if known is not None and because is not None:
                if not chain.is_enabled:  # the next generation will be a later one than any
                    return
                now_ms, generation_min = self._clock.wall_ms(), known.generation + 1
                chain = chain.renewed(now_ms=now_ms, generation_min=generation_min)
                data = chain.to_json()
                version = (await self._store.set(self._paths.feed, data, version=version)).version
                log.error(
                    "feed.zookeeper_restored",
                    evidence=because,
                    generation=chain.generation,
                    next_step=NEXT_STEP,
                )
            now = KnownChain.of(data, version)
        except (NoNodeError, ConflictError, CorruptionError):
            return  # what is on the disk stays. The watch tells of the next change
        if now != known:
            await self._disk.write(now)
        if chain.is_after_restore and chain.generation != self._generation:
            raise SessionLostError("ZooKeeper was restored from a backup")
