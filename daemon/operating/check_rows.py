"""The periodic checks at one moment, for people and for programs. ``checks`` gathers them."""

from dataclasses import dataclass
from typing import Any

from auditor.checks.placement import UNCOMPARED
from auditor.checks.records import CheckRun
from daemon.operating.progress import counted, duration_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One check. ``interval_s``: as this host's settings have it; 0: only when somebody asks for
    it."""

    name: str
    about: str
    interval_s: float
    last_ms: int | None = None
    """When it was last completed, by whomever; None: never, as far as anybody can tell."""
    is_forced: bool = False
    """Somebody asks for it, and it has not ended since."""
    due_ms: int | None = None
    """Wall-clock; None: never."""
    running: CheckRun | None = None
    last: CheckRun | None = None
    """The last run of ours that was completed."""

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.name,
            "about": self.about,
            "interval_s": self.interval_s,
            "last_run_ms": self.last_ms,
            "is_forced": self.is_forced,
            "next_due_ms": self.due_ms,
            "running": None if self.running is None else run_record(self.running),
            "last": None if self.last is None else run_record(self.last),
        }

    def to_text(self, *, now_ms: int) -> str:
        last = "never run" if self.last_ms is None else f"last run {_ago(self.last_ms, now_ms)}"
        lines = [f"{self.name}: {last}; {self._due_text(now_ms)}"]
        if self.running is not None:
            lines.append(f"  {run_text(self.running)}")
        if self.last is not None:
            took = duration_text(self.last.active_ms / 1000)
            lines.append(
                f"  its last run looked at {counted(self.last.ledger_count, 'ledger')} in {took}: "
                f"{counts_text(self.last)}"
            )
        return "\n".join(lines)

    def _due_text(self, now_ms: int) -> str:
        if self.running is not None:
            return "a run is under way"
        if self.is_forced:
            return "asked for"
        if self.due_ms is None:
            return "switched off"
        if self.due_ms <= now_ms:
            return "due now"
        return f"due in {duration_text((self.due_ms - now_ms) / 1000)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """All of them at one moment. ``concerns``: what keeps them from running, as sentences."""

    rows: tuple[CheckRow, ...]
    leader: str | None
    is_paused: bool
    concerns: tuple[str, ...]

    def row(self, name: str) -> CheckRow:
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "leader": self.leader,
            "is_paused": self.is_paused,
            "concerns": list(self.concerns),
            "checks": [row.to_json() for row in self.rows],
        }

    def to_text(self, *, now_ms: int) -> str:
        return "\n".join(row.to_text(now_ms=now_ms) for row in self.rows)


def run_record(run: CheckRun) -> dict[str, Any]:
    return {
        "started_ms": run.started_ms,
        "finished_ms": run.finished_ms,
        "ledger_count": run.ledger_count,
        "ledgers_left": run.ledgers_left,
        "ledgers_per_s": run.ledgers_per_s,
        "remaining_s": run.remaining_s,
        "pause": run.pause or None,
        "counts": dict(run.counts),
    }


def run_text(run: CheckRun) -> str:
    """Of one that is under way."""
    text = f"{counted(run.ledger_count, 'ledger')} looked at, about {run.ledgers_left:,} left"
    if run.remaining_s is not None:
        text += f", {duration_text(run.remaining_s)} to go at {run.ledgers_per_s:,.0f} a second"
    if run.counts:
        text += f"; {counts_text(run)}"
    return f"{text}; waits: {run.pause}" if run.pause else text


def counts_text(run: CheckRun) -> str:
    if not any(run.counts.values()):
        return "nothing"
    return ", ".join(
        f"{count:,} {kind.replace('_', ' ')}{_WHY.get(kind, '')}"
        for kind, count in run.counts.items()
    )


_WHY = {UNCOMPARED: " (no source of racks is set: nothing to compare)"}


def _ago(time_ms: int, now_ms: int) -> str:
    return f"{duration_text((now_ms - time_ms) / 1000)} ago"
