"""What was measured, a JSON line each."""

from collections.abc import Hashable

import msgspec


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """All ledgers of a load looked at once. ``repeat`` counts from 1.

    A copy is an entry that was read from one bookie. CPU is user and system, in seconds, of all processes that
    look (with Spark, its JVM and its Python), of all bookies, of ZooKeeper.
    """

    load: str
    contender: str
    level: str
    repeat: int
    ledger_count: int
    copies: int
    copy_bytes: int
    elapsed_s: float
    cpu_s: float
    bookies_cpu_s: float
    zookeeper_cpu_s: float

    @property
    def key(self) -> Hashable:
        return self.load, self.contender, self.level, self.repeat
