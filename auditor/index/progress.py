"""How far a scan of all metadata is."""

from dataclasses import dataclass

FIRST_REPORT_S = 5.0


@dataclass(slots=True, kw_only=True)
class ScanProgress:
    """Times are monotonic seconds. ``expected_count``: about how many ledgers there are; 0:
    unknown."""

    expected_count: int
    started_s: float
    read_count: int = 0
    report_after_s: float = FIRST_REPORT_S

    def add(self, count: int, *, now_s: float) -> bool:
        """Whether that is worth a line in the log: they come at growing intervals."""
        self.read_count += count
        if now_s - self.started_s < self.report_after_s:
            return False
        self.report_after_s *= 2
        return True

    def per_s(self, now_s: float) -> float:
        """Ledgers read in a second, on average."""
        return self.read_count / max(now_s - self.started_s, 0.001)

    def fields(self, now_s: float) -> dict[str, object]:
        """For the log."""
        return {
            "ledger_count": self.read_count,
            "expected_count": self.expected_count or None,
            "ledgers_per_s": round(self.per_s(now_s)),
            "duration_s": round(now_s - self.started_s, 3),
        }
