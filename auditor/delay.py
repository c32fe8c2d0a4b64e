"""The recovery delay as it stands in ``lostBookieRecoveryDelay``: one for the whole cluster, Java's
znode.

The first leader makes it, from its setting; afterwards the znode decides. A write of it counts at
once, whatever happened to the znode before: also its deletion, which Java's auditor never recovers
from (G29).
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
    """The recovery delay, and the write that it comes from (0: the znode is not there)."""

    delay_s: int
    mzxid: int
    is_stored: bool
    """False: it is the setting's, as the znode is missing or cannot be read."""
    refusal: str = ""
    """Why the znode cannot be read, for people; empty where it can, or is missing."""

    def is_asking_for_audit(self, before: "Delay") -> bool:
        """Written unchanged it says not to wait any longer for those that are away, as with Java
        (Auditor's LostBookieRecoveryDelayChangedCb): so an operator triggers an audit."""
        is_written = self.is_stored and self.mzxid != before.mzxid
        return is_written and self.delay_s == before.delay_s


class RecoveryDelay:
    """``current`` is the one in force, once ``prepare`` was called."""

    def __init__(self, store: MetadataStore, ur: str, *, default_s: int, clock: Clock) -> None:
        self._store, self._ur = store, ur
        self._clock = clock
        self._path = payloads.recovery_delay_path(ur)
        self._default_s = default_s
        self.current = Delay(delay_s=default_s, mzxid=0, is_stored=False)

    async def prepare(self) -> None:
        """Make the znode where it is missing, and say what is in force. Raises UnavailableError."""
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
        """Each write, and the deletion: what was in force before, and what is now. Ends with the
        session.

        Where it cannot be read the setting is in force, as for the next leader.
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
    """As it stands. ``default_s`` is in force where the znode is missing, or cannot be read."""
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
    """For whoever acts on it, and goes on; a command tells it in its own words."""
    if delay.refusal:
        log.error("recovery_delay.unreadable", error=delay.refusal, used_s=delay.delay_s)
