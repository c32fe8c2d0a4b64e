"""The entry of the table of conditions that explains a condition, and parts of the rules."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from daemon.status.answers import ConditionRecord, Health, Severity
from daemon.status.state import Status
from daemon.words import counted

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
        return "\n".join([f"{self.code}: {self.severity}", *wrapped])


CONDITIONS: dict[str, Entry] = {}
"""By code. Conditions of equal severity are listed in this order."""


def condition(rule: Rule) -> Rule:
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
    )
    return rule


def health(found: Iterable[ConditionRecord]) -> Health:
    index = max((ASCENDING.index(each.severity) for each in found), default=0)
    return HEALTH[index]


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
