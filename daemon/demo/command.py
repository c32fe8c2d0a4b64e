"""``bookmender demo``."""

import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from daemon.cli.option_types import Folder
from daemon.demo.scenario import Plan, Run, run


@click.command()
@click.option("--ledgers", default=300, show_default=True, type=click.IntRange(min=10))
@click.option("--bookies", default=6, show_default=True, type=click.IntRange(min=6))
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(min=2))
@click.option("--bookkeeper", help="Version of the bookies.")
@click.option(
    "--data",
    type=Folder(),
    help="Keep data and logs in this folder.",
)
def demo(ledgers: int, bookies: int, nodes: int, bookkeeper: str | None, data: Path | None) -> None:
    """Kill a bookie, watch the repair, and verify every copy.

    The demo runs twice, each time on a new cluster on loopback. In the second run the leading
    daemon is killed too. It needs Java 17 or later.

    Exit code 0: no acknowledged entry was lost, and everything that can be repaired was repaired.
    """
    base = data or Path(tempfile.mkdtemp(prefix="bookmender-demo-"))
    plan = Plan(
        data=base / "bookie-lost",
        bookkeeper=bookkeeper,
        ledger_count=ledgers,
        bookie_count=bookies,
        node_count=nodes,
    )
    plans = [plan, replace(plan, data=base / "leader-lost-too", kill_leader=True)]
    is_over = False
    try:
        verdicts = [_run(number, plan) for number, plan in enumerate(plans, start=1)]
        is_over = all(verdicts)
    except KeyboardInterrupt:
        is_over = True
        raise
    finally:
        if is_over and data is None:
            shutil.rmtree(base, ignore_errors=True)
        elif not is_over and any(base.rglob("*.log")):
            click.echo(f"data and logs of the clusters are kept in {base}", err=True)
    sys.exit(0 if all(verdicts) else 1)


def _run(number: int, plan: Plan) -> bool:
    began_s = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began_s:5.1f} s] {text}")

    what = "a bookie and the leading daemon are" if plan.kill_leader else "a bookie is"
    click.secho(f"\nRun {number}: {what} killed", bold=True)
    finished = run(plan, say)
    for text in report(finished):
        click.echo(text)
    problems = list_problems(finished)
    for problem in problems:
        click.secho(f"  PROBLEM  {problem}", fg="red")
    verdict = "NOT WHOLE" if problems else "WHOLE: no entry is lost, and every ledger is repaired"
    click.secho(f"  verdict  {verdict}", bold=True, fg="red" if problems else "green")
    return not problems


def report(finished: Run) -> list[str]:
    """Return the figures of one run, one per line."""
    proofs = finished.proofs
    first_mark_s, whole_s = finished.first_mark_s or 0.0, finished.whole_s or 0.0
    busy_s = max(whole_s - first_mark_s, 0.1)
    return [
        f"  ledgers  {len(proofs)} written, {finished.marked_max} marked at once, "
        f"{finished.repaired_ledgers} repaired, {finished.repaired_entries} entries "
        f"({finished.repaired_bytes / 1e6:.1f} MB) copied",
        f"  entries  {sum(proof.written.acknowledged for proof in proofs)} acknowledged, "
        f"{sum(len(p.lost) for p in proofs)} lost, {sum(len(p.wrong) for p in proofs)} wrong",
        f"  copies   {sum(proof.copies_good for proof in proofs)} of "
        f"{sum(proof.copies_expected for proof in proofs)} that the metadata names exist and are "
        "good",
        f"  times    from the kill: znode gone {finished.bookie_gone_s or 0:.1f} s, "
        f"first mark {first_mark_s:.1f} s, whole {whole_s:.1f} s",
        f"  rates    {finished.repaired_ledgers / busy_s:.0f} ledgers/s, "
        f"{finished.repaired_entries / busy_s:.0f} entries/s from the first mark to whole",
    ]


def list_problems(finished: Run) -> list[str]:
    """Return the problems that a user would report; empty for a good run."""
    problems = list(finished.errors)
    for proof in finished.proofs:
        ledger = f"ledger {proof.written.ledger_id}"
        for what, entries in (
            ("lost", proof.lost),
            ("not as written", proof.wrong),
            ("only on the killed bookie", proof.out_of_reach),
        ):
            if entries:
                problems.append(f"{ledger}: entries {what}: {entries[:5]} …")
        if not proof.is_whole:
            problems.append(f"{ledger}: {proof.copies_good} of {proof.copies_expected} copies")
    if not finished.repaired_ledgers:
        problems.append("no ledger was repaired: the run proves nothing")
    return problems
