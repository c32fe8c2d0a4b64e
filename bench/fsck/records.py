"""The results, one JSON line per record."""

from collections.abc import Hashable

import msgspec

from bench.fsck.processes import SparkCpu


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """All ledgers of a load, inspected once. ``repeat`` counts from 1.

    A copy is an entry that was read from one bookie. CPU is user and system, in seconds: of all
    processes that inspect (on Spark also its JVM and its Python), of all bookies, and of ZooKeeper.
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
    """The parts of ``cpu_s`` for a run on Spark."""
    scaling_of_cores: float | None = None
    """The gain from a second core during the run, for comparisons with a run on one core
    (``scaling_of_cores``)."""

    @property
    def key(self) -> Hashable:
        return self.load, self.contender, self.level, self.repeat

    @property
    def cores_busy(self) -> float:
        """The average number of busy cores, for all of these processes together."""
        return (self.cpu_s + self.bookies_cpu_s + self.zookeeper_cpu_s) / self.elapsed_s
