"""What was measured, a JSON line each."""

from collections.abc import Hashable

import msgspec

from bench.fsck.processes import SparkCpu


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """All ledgers of a load looked at once. ``repeat`` counts from 1.

    A copy is an entry that was read from one bookie. CPU is user and system, in seconds, of all
    processes that look (with Spark, its JVM and its Python), of all bookies, of ZooKeeper.
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
    spark_cpu: SparkCpu | None = None
    """What makes up ``cpu_s``, of a run on Spark."""
    scaling_of_cores: float | None = None
    """What two cores were worth in these minutes, where a run on one is to be compared
    (``scaling_of_cores``)."""

    @property
    def key(self) -> Hashable:
        return self.load, self.contender, self.level, self.repeat

    @property
    def cores_busy(self) -> float:
        """On average, with all of these processes together."""
        return (self.cpu_s + self.bookies_cpu_s + self.zookeeper_cpu_s) / self.elapsed_s
