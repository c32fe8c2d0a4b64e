"""``bookmender demo``."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from daemon.cli.option_types import Folder
from daemon.demo.proof import LedgerProof
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
    problems = list_problems(finished)
    for text in report(finished):
        click.echo(text)
    for problem in problems:
        click.secho(f"  PROBLEM  {problem}", fg="red")
    verdict = (
        "NOT WHOLE"
        if problems
        else "WHOLE: no entry is lost, and every ledger that can be repaired is repaired"
    )
    click.secho(f"  verdict  {verdict}", bold=True, fg="red" if problems else "green")
    return not problems


def report(finished: Run) -> list[str]:
    """Return the figures of one run, one per line."""
    proofs, timeline = finished.proofs, finished.timeline
    first_mark_s, whole_s = timeline.first_mark_s or 0.0, timeline.whole_s or 0.0
    entries = sum(proof.written.acknowledged for proof in proofs)
    good = sum(proof.copies_good for proof in proofs)
    expected = sum(proof.copies_expected for proof in proofs)
    busy_s = max(whole_s - first_mark_s, 0.1)
    out_of_reach = [proof for proof in proofs if proof.out_of_reach]
    lines = [
        f"  ledgers  {len(proofs)} written, {timeline.marked_max} marked at once, "
        f"{timeline.repaired_ledgers} repaired, {timeline.repaired_entries} entries "
        f"({timeline.repaired_bytes / 1e6:.1f} MB) copied",
        f"  entries  {entries} acknowledged, {sum(len(p.lost) for p in proofs)} lost, "
        f"{sum(len(p.wrong) for p in proofs)} wrong",
        f"  copies   {good} of {expected} that the metadata names exist and are good",
        f"  times    from the kill: znode gone {timeline.bookie_gone_s or 0:.1f} s, "
        f"first mark {first_mark_s:.1f} s, whole {whole_s:.1f} s",
        f"  rates    {timeline.repaired_ledgers / busy_s:.0f} ledgers/s, "
        f"{timeline.repaired_entries / busy_s:.0f} entries/s from the first mark to whole",
        f"  costs    {finished.cpu_s:.1f} CPU seconds, at most {finished.rss_bytes_max / 1e6:.0f} "
        f"MB RSS a daemon, {timeline.zookeeper_requests / max(timeline.repaired_ledgers, 1):.1f} "
        "ZooKeeper requests a repaired ledger (idling included)",
    ]
    if out_of_reach:
        reasons = sorted({note.reason.value for note in finished.left.queue.waiting})
        lines.append(
            f"  waiting  {len(out_of_reach)} ledgers whose only copies are on the killed bookie: "
            f"reported as {', '.join(reasons) or 'nothing'}"
        )
    return lines


def list_problems(finished: Run) -> list[str]:
    """Return the problems that a user would report; empty for a good run."""
    problems = [
        *(
            f"ledger {proof.written.ledger_id}: {problem}"
            for proof in finished.proofs
            for problem in _problems_of(proof)
        ),
        *_unexplained(finished),
        *finished.timeline.errors,
    ]
    if not finished.timeline.repaired_ledgers:
        problems.append("no ledger was repaired: the run proves nothing")
    return problems


def _problems_of(proof: LedgerProof) -> Iterator[str]:
    if proof.lost or proof.wrong:
        what = "lost" if proof.lost else "not as written"
        yield f"entries {what}: {', '.join(map(str, (proof.lost or proof.wrong)[:5]))} …"
    if not proof.is_whole and not proof.out_of_reach:
        yield f"{proof.copies_good} of {proof.copies_expected} copies"
    if proof.written.ended_by:
        yield f"its live writer was stopped: {proof.written.ended_by}"


def _unexplained(finished: Run) -> list[str]:
    """Return the differences between the ledgers that wait and those that cannot be repaired. Each
    ledger that waits must have a reason."""
    noted = {note.ledger_id: note.reason.value for note in finished.left.queue.waiting}
    stuck = {proof.written.ledger_id for proof in finished.proofs if proof.out_of_reach}
    return [
        *(
            f"ledger {i} waits though it can be repaired: {noted[i]}"
            for i in sorted(noted.keys() - stuck)
        ),
        *(
            f"ledger {i} cannot be repaired, but no reason is reported"
            for i in sorted(stuck - noted.keys())
        ),
    ]
