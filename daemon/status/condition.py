"""The entry of the table of conditions that explains a condition, and parts of the rules."""

import difflib
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from daemon.status.answers import ConditionRecord, Health, Severity
from daemon.status.state import Status
from daemon.words import counted
from replication.orders import Mute

NAMES_SHOWN_MAX = 5
EXPLANATION_WIDTH = 96

ASCENDING: tuple[Severity, ...] = ("INFO", "UNKNOWN", "WARN", "ERROR")
HEALTH: tuple[Health, ...] = ("OK", "UNKNOWN", "WARN", "ERROR")
"""By the highest severity of the conditions."""


class Found(NamedTuple):
    """What a rule says of a condition that holds: fields of ``ConditionRecord``."""

    severity: Severity
    fact: str
    action: str
    data: dict[str, Any] = {}  # noqa: RUF012  # nothing changes it


Rule = Callable[[Status], Found | None]
"""Returns None if the condition does not hold. Pure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the table. ``severity``: the severities that the condition can have, and when.
    The first sentence of ``meaning`` is a summary."""

    code: str
    severity: str
    meaning: str
    causes: str
    action: str
    clears: str
    rule: Rule
    can_be_muted: bool
    """False if it says that data is lost or unavailable."""

    @property
    def summary(self) -> str:
        return self.meaning.partition(". ")[0]

    def to_text(self) -> str:
        parts = {
            "Meaning": self.meaning,
            "Causes": self.causes,
            "Do": self.action,
            "Clears": self.clears,
        }
        wrapped = (
            textwrap.fill(f"{name}: {text}", EXPLANATION_WIDTH, subsequent_indent="  ")
            for name, text in parts.items()
        )
        never = () if self.can_be_muted else ("It cannot be muted.",)
        return "\n".join([f"{self.code}: {self.severity}", *wrapped, *never])


CONDITIONS: dict[str, Entry] = {}
"""By code. Conditions of equal severity are listed in this order."""


def condition(rule: Rule, *, can_be_muted: bool = True) -> Rule:
    """Add the rule to the table. Its name is the code, and its docstring has the other parts."""
    text = " ".join((rule.__doc__ or "").split())
    parts = re.fullmatch("(.+?) - (.+) Causes: (.+) Do: (.+) Clears: (.+)", text)
    assert parts is not None, rule
    severity, meaning, causes, action, clears = parts.groups()
    code = rule.__name__.upper()
    CONDITIONS[code] = Entry(
        code=code,
        severity=severity,
        meaning=meaning,
        causes=causes,
        action=action,
        clears=clears,
        rule=rule,
        can_be_muted=can_be_muted,
    )
    return rule


condition_of_data = partial(condition, can_be_muted=False)


def entry_of(code: str) -> Entry:
    """Return the entry that an operator names. Raises LookupError with a hint."""
    wanted = code.upper().replace("-", "_")
    if wanted in CONDITIONS:
        return CONDITIONS[wanted]
    near = difflib.get_close_matches(wanted, CONDITIONS, n=1)
    hint = f"Did you mean {near[0]}?" if near else "bookmender status --explain lists all codes."
    raise LookupError(f"no condition is called {code!r}. {hint}")


def subjects(found: ConditionRecord) -> tuple[str, ...]:
    """Return the bookies that a condition is about, or the reasons that block repairs; none if it
    is about the whole cluster."""
    data = found.data
    return tuple(data.get("named_by_ledgers") or data.get("bookies") or data.get("by_reason") or ())


def with_mute(found: ConditionRecord, mute: Mute | None, *, now_ms: int) -> ConditionRecord:
    """Return the condition, muted if the mute applies to it."""
    if mute is None or now_ms >= mute.until_ms or not CONDITIONS[found.code].can_be_muted:
        return found
    graver = ASCENDING[ASCENDING.index(found.severity) :]
    is_new = mute.subjects and not set(mute.subjects).issuperset(subjects(found))
    if mute.severity not in graver or is_new:
        return found
    return replace(found, muted_until_ms=mute.until_ms)


def health(found: Iterable[ConditionRecord]) -> Health:
    """Return the highest severity of the conditions that are not muted."""
    loud = (each.severity for each in found if each.muted_until_ms is None)
    return HEALTH[max(map(ASCENDING.index, loud), default=0)]


def exit_code(found: Iterable[ConditionRecord]) -> int:
    """Return 0 for OK, 1 for WARN and ERROR, 3 for UNKNOWN."""
    return {"OK": 0, "UNKNOWN": 3}.get(health(found), 1)


def some(names: Sequence[object], *, total: int | None = None) -> str:
    """Return the first names, and how many more there are: ``1, 2, 3 and 4 more``.

    ``total``: the number of all names, if ``names`` has only some of them.
    """
    shown = ", ".join(map(str, names[:NAMES_SHOWN_MAX]))
    more = (len(names) if total is None else total) - min(len(names), NAMES_SHOWN_MAX)
    return f"{shown} and {more:,} more" if more > 0 else shown


def count_is(count: int, unit: str) -> str:
    """Return ``1 bookie is`` or ``2 bookies are``."""
    return f"{counted(count, unit)} {'is' if count == 1 else 'are'}"
