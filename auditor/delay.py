"""The recovery delay of the cluster, from Java's znode ``lostBookieRecoveryDelay``.

The first leader creates the znode from its setting; afterwards the znode decides. Each write takes
effect at once, even after the znode was deleted. Java's auditor never recovers from a deletion
(G29).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

import structlog

from ledgers.answers import until_answered
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NodeExistsError, NoNodeError, UnauthorizedError
from ledgers.store import MetadataStore
from replication.queue import payloads

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The recovery delay, and the ``mzxid`` of the write that it comes from (0: the znode is
    missing or access is denied)."""

    delay_s: int
    mzxid: int
    is_stored: bool
    """False: ``delay_s`` is the setting, because the znode is missing or cannot be read."""
    refusal: str = ""
    """Why the znode cannot be read, for people; empty if it can be read or is missing."""

    def is_asking_for_audit(self, before: "Delay") -> bool:
        """True if the delay was written again unchanged. As with Java (Auditor's
        LostBookieRecoveryDelayChangedCb), this asks to treat absent bookies as lost at once.
        Operators trigger an audit this way."""
        is_written = self.is_stored and self.mzxid != before.mzxid
        return is_written and self.delay_s == before.delay_s


class RecoveryDelay:
    """Follows the recovery delay. ``current`` is the one in force, after ``prepare``."""

    def __init__(self, store: MetadataStore, ur: str, *, default_s: int, clock: Clock) -> None:
        self._store, self._ur = store, ur
        self._clock = clock
        self._path = payloads.recovery_delay_path(ur)
        self._default_s = default_s
        self.current = Delay(delay_s=default_s, mzxid=0, is_stored=False)

    async def prepare(self) -> None:
        """Create the znode if it is missing, and log the delay in force. Raises
        UnavailableError."""
        data = payloads.recovery_delay_to_bytes(self._default_s)
        is_new = False
        with suppress(NodeExistsError):
            await self._store.create(self._path, data, with_parents=True)
            is_new = True
        self.current = await self._read()
        log_refusal(self.current)
        is_znodes = self.current.is_stored and not is_new
        log.info(
            "recovery_delay.read",
            delay_s=self.current.delay_s,
            source="lostBookieRecoveryDelay" if is_znodes else "setting",
        )

    async def changes(self) -> AsyncGenerator[tuple[Delay, Delay], None]:
        """Yield the delay before and after each write or deletion of the znode. Ends with the
        session.

        If the znode cannot be read, the setting is in force, as for the next leader.
        """
        async with aclosing(self._store.watch(self._path)) as events:
            async for _ in events:
                now = await until_answered(
                    self._read, event="recovery_delay.unread", clock=self._clock
                )
                before, self.current = self.current, now
                if self.current != before:
                    log_refusal(now)
                    log.info("recovery_delay.changed", delay_s=self.current.delay_s)
                    yield before, self.current

    async def _read(self) -> Delay:
        return await read_delay(self._store, self._ur, default_s=self._default_s)


async def read_delay(store: MetadataStore, ur: str, *, default_s: int) -> Delay:
    """Return the delay in force: ``default_s`` if the znode is missing or cannot be read."""
    mzxid, refusal = 0, ""
    try:
        data, stat = await store.get(payloads.recovery_delay_path(ur))
        mzxid = stat.mzxid
        delay_s = payloads.parse_recovery_delay(data)
        return Delay(delay_s=delay_s, mzxid=mzxid, is_stored=True)
    except NoNodeError:
        pass
    except (CorruptionError, UnauthorizedError) as error:
        refusal = str(error)
    return Delay(delay_s=default_s, mzxid=mzxid, is_stored=False, refusal=refusal)


def log_refusal(delay: Delay) -> None:
    """Log an unreadable znode, for services, which go on. A command prints ``refusal`` itself."""
    if delay.refusal:
        log.error("recovery_delay.unreadable", error=delay.refusal, used_s=delay.delay_s)
