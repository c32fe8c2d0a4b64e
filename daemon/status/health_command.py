"""``bookmender health explain``: prints what a condition means."""

import difflib

import click

from daemon.status.conditions import Code
from daemon.status.explanations import EXPLANATIONS, explain


@click.group()
def health() -> None:
    """The conditions that bookmender status reports."""


@health.command("explain")
@click.argument("code", required=False)
def explain_code(code: str | None) -> None:
    """Explain a condition: its meaning, usual causes, what to do, and how it clears.

    Without CODE: list all codes.
    """
    if code is None:
        width = max(map(len, Code))
        for each, it in EXPLANATIONS.items():
            click.echo(f"{each:<{width}}  {it.summary}")
        return
    wanted = code.upper().replace("-", "_")
    if wanted not in list(Code):
        near = difflib.get_close_matches(wanted, list(Code), n=1)
        hint = f"Did you mean {near[0]}?" if near else "bookmender health explain lists all codes."
        raise click.UsageError(f"no condition is called {code!r}. {hint}")
    click.echo(explain(Code(wanted)))
