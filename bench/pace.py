"""The pace of copying over time: one long repair with default settings, while a Java writer starts
and stops."""

import asyncio
import time
from collections.abc import Iterator, Sequence

from bench.arena import repair_arena
from bench.contenders import OURS
from bench.loads import alike
from bench.loss import Loss
from bench.records import Record, Records
from bench.report import table
from bench.turns import warm_bookies, warm_daemon
from bench.usage import written_bytes
from bench.waiting import wait_until
from bench.writer import PacedWriter
from tests.java.tool import JavaTool

PACE = "pace"
"""The name of the records: one for each span of ``SPAN_S``, after the first copies."""
LOAD = alike(PACE, "10 of 90,000 × 1 KB, E3 W3", 10, 90_000)
SAMPLE_S, SPAN_S = 0.1, 0.5
WRITES_S = 5.0
"""The writer's JVM starts with the first copies, which takes some seconds. Then it writes for this
long."""
BEGUN_BYTES = 1_000_000
BEGIN_TIMEOUT_S = 60.0


async def measure_pace(java: JavaTool) -> list[Record]:
    """Measure on a new local cluster. Raises UnavailableError."""
    async with repair_arena(java) as arena:
        await warm_bookies(arena)
        async with warm_daemon(arena, OURS) as child:
            ledgers = await arena.write(LOAD)
            loss = Loss(arena, child, ledgers, is_beside_writer=True)
            repair = asyncio.create_task(loss.measure())
            samples: list[tuple[float, int]] = []
            sampling = asyncio.create_task(_sample(child.pid, samples))
            try:
                await wait_until(
                    lambda: bool(samples) and samples[-1][1] - samples[0][1] >= BEGUN_BYTES,
                    "the first copies",
                    timeout_s=BEGIN_TIMEOUT_S,
                )
                began_s = samples[-1][0]
                uri, avoid = arena.cluster.metadata_service_uri, arena.victim
                writer = await asyncio.to_thread(lambda: PacedWriter(uri, avoid=avoid))
                writes_s = time.monotonic()
                await asyncio.sleep(WRITES_S)
                adds = {
                    begin_s: await asyncio.to_thread(writer.latency, begin_s, begin_s + SPAN_S)
                    for begin_s in _steps(writes_s, time.monotonic())
                }
                await asyncio.to_thread(writer.close)
                measure = await repair
            finally:
                sampling.cancel()
                repair.cancel()
            await arena.judge_and_restore(ledgers)
    records = []
    for begin_s in _steps(began_s, measure["gone_at_s"] + measure["whole_s"]):
        values = {"copied_mb_per_s": _rate(samples, begin_s, begin_s + SPAN_S) / 1e6}
        slowest = [each["max_ms"] for at_s, each in adds.items() if 0 <= at_s - begin_s < SPAN_S]
        values |= {"slowest_add_ms": slowest[0]} if slowest else {}
        labels = {"begin_ms": round(1000 * (begin_s - began_s))}
        records.append(Record(name=PACE, labels=labels, values=values))
    return records


async def _sample(pid: int, samples: list[tuple[float, int]]) -> None:
    while True:
        samples.append((time.monotonic(), written_bytes(pid)))
        await asyncio.sleep(SAMPLE_S)


def _steps(begin_s: float, end_s: float) -> Iterator[float]:
    at_s = begin_s
    while at_s + SPAN_S <= end_s:
        yield at_s
        at_s += SPAN_S


def _rate(samples: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Return the bytes per second between the samples closest to the ends of the span."""
    first = min(samples, key=lambda sample: abs(sample[0] - begin_s))
    last = min(samples, key=lambda sample: abs(sample[0] - end_s))
    return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


def pace_section(records: Records) -> list[str]:
    spans = records.find(PACE)
    rows = [
        [
            f"{float(span.labels['begin_ms']) / 1000:g}",
            f"{span.values['copied_mb_per_s']:.1f}",
            f"{adds:.1f}" if (adds := span.values.get("slowest_add_ms")) is not None else "",
        ]
        for span in spans
    ]
    if not rows:
        return []
    return [
        "## The pace while a writer starts and stops\n\nOne repair with our defaults, in spans of "
        f"{SPAN_S:g} s after the first copies. A client writes in the spans that have adds.\n\n"
        + table(["s", "copied, MB/s", "slowest add, ms"], rows)
    ]
