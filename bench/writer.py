"""A Java client that writes while bookies are repaired. Measures the latency of its adds.

It sends 500 adds of 1 KB a second on a fixed schedule. Each latency counts from the moment when the
add was due.
"""

import math
import threading
import time
from collections.abc import Iterable, Sequence

import msgspec

from daemon.local.jars import BOOKKEEPER_DEFAULT
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from tests.java import messages
from tests.java.tool import LongCommand

ADDS_PER_S = 500
PAYLOAD_BYTES = 1_024
CATCH_UP_TIMEOUT_S = 30.0
CATCH_UP_POLL_S = 0.05


class PacedWriter(LongCommand):
    """The writer. ``avoid``: the bookie that will be lost; the writer's ledger has no copies on
    it."""

    def __init__(self, uri: str, *, avoid: BookieId) -> None:
        shape: dict[str, object] = msgspec.to_builtins(
            messages.Shape(ack_quorum=2, sizes=(PAYLOAD_BYTES,))
        )
        options = shape | {"avoid": avoid, "perS": ADDS_PER_S}
        super().__init__("write-paced", uri, options, version=BOOKKEEPER_DEFAULT)
        pacing = next(self._answer)
        assert isinstance(pacing, messages.Pacing), pacing
        self._start_ns, self._interval_ns = pacing.start_ns, pacing.interval_ns
        self._latencies_us: list[int] = []
        """Latencies by entry id. Only the listener appends to it."""
        self._error: Exception | None = None
        self._listener = threading.Thread(target=self._listen, name="paced-writer", daemon=True)
        self._listener.start()

    def latency(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Return the number and the latencies of the adds that were due between two monotonic
        times. Waits until all of them are acknowledged."""
        first, stop = self._entry_due(begin_s), self._entry_due(end_s)
        deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
        while len(self._latencies_us) < stop:
            if self._error is not None or time.monotonic() > deadline_s:
                raise UnavailableError(f"the Java writer does not go on: {self._error}")
            time.sleep(CATCH_UP_POLL_S)
        return latencies(us / 1e3 for us in self._latencies_us[first:stop])

    def close(self) -> None:
        super().close()
        self._listener.join()

    def _entry_due(self, at_s: float) -> int:
        since_start_ns = at_s * 1e9 - self._start_ns
        return max(0, math.ceil(since_start_ns / self._interval_ns))

    def _listen(self) -> None:
        try:
            for record in self._answer:
                assert isinstance(record, messages.Paced), record
                assert record.first == len(self._latencies_us), record
                self._latencies_us.extend(record.latencies_us)
        except Exception as error:  # reported to the next caller
            self._error = error


def latencies(found_ms: Iterable[float]) -> dict[str, float]:
    """Return the number of adds, and percentiles of their latencies in milliseconds."""
    ordered = sorted(found_ms)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    found = {name: percentile(ordered, share) for name, share in shares.items() if ordered}
    return {"adds": len(ordered), **found}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
