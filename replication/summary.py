"""What a worker did, as a log can bear it: one line every few seconds while it does something."""

from dataclasses import dataclass

import structlog

from replication.outcome import Outcome, OutcomeKind

log = structlog.get_logger()

SUMMARY_INTERVAL_S = 5.0


@dataclass(slots=True)
class Summary:
    """Counts since the last line."""

    repaired_count: int = 0
    waiting_count: int = 0
    entry_count: int = 0
    entry_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        self.repaired_count += outcome.kind is OutcomeKind.DONE
        self.waiting_count += outcome.kind is OutcomeKind.WAITING
        self.entry_count += outcome.entry_count
        self.entry_bytes += outcome.entry_bytes

    def tell(self, *, at_work_count: int) -> None:
        """Log, unless nothing has happened, and begin anew."""
        if not self.repaired_count and not self.waiting_count:
            return
        log.info(
            "ledgers.repaired",
            ledger_count=self.repaired_count,
            entry_count=self.entry_count,
            entry_bytes=self.entry_bytes,
            put_aside_count=self.waiting_count,
            at_work_count=at_work_count,
        )
        self.repaired_count = self.waiting_count = self.entry_count = self.entry_bytes = 0

    def tell_if_done(self) -> None:
        """Nothing is at hand: say so at once where anything was repaired. Tries that were in vain
        can wait."""
        if self.repaired_count:
            self.tell(at_work_count=0)
