"""The pace of copying over time: one long repair with default settings, while a Java writer starts
and stops."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from auditor.activity import ACTIVE_FOR_S
from bench.arena import Arena, open_arena
from bench.contenders import OURS
from bench.loads import Load, Part
from bench.loss import Loss
from bench.svg import picture, text
from bench.turns import warm_bookies, warm_daemon
from bench.usage import written_bytes
from bench.writer import PacedWriter
from ledgers.errors import UnavailableError
from tests.java.tool import JavaTool

LOAD = Load(
    name="pace",
    title="10 of 90,000 × 1 KB, E3 W3",
    parts=(Part(ledger_count=10, entry_count=90_000),),
)
SAMPLE_S = 0.1
SPAN_S = 0.5
"""Length of the spans that are plotted."""
WRITES_S = 5.0
"""The writer's JVM starts with the first copies, which takes some seconds. Then it writes for this
long."""
BEGUN_BYTES = 1_000_000
BEGIN_TIMEOUT_S = 60.0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span of ``SPAN_S``. ``copied_mb_per_s``: bytes that the daemon sent. ``slowest_add_ms``:
    0 if nothing was added."""

    begin_s: float
    copied_mb_per_s: float
    slowest_add_ms: float


class PaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The whole measurement. Times are seconds after the first copies."""

    spans: Sequence[Span]
    writer_began_s: float
    writer_ended_s: float
    judged_copies: int


async def measure_pace(java: JavaTool) -> PaceRecord:
    """Measure on a new local cluster. Raises UnavailableError."""
    async with open_arena(java) as arena:
        await warm_bookies(arena)
        async with warm_daemon(arena, OURS) as child:
            ledgers = await arena.write(LOAD)
            loss = Loss(arena, child, ledgers, is_beside_writer=True)
            repair = asyncio.create_task(loss.measure(idle_packets_per_s=0))
            samples: list[tuple[float, int]] = []
            sampling = asyncio.create_task(_sample(child.pid, samples))
            try:
                began_s = await _begun_s(samples)
                writer = await asyncio.to_thread(_writer, arena)
                writer_began_s = time.monotonic()
                await asyncio.sleep(WRITES_S)
                writer_ended_s = time.monotonic()
                latencies = [
                    (begin_s, await asyncio.to_thread(writer.latency, begin_s, begin_s + SPAN_S))
                    for begin_s in _steps(writer_began_s, writer_ended_s)
                ]
                await asyncio.to_thread(writer.close)
                measure = await repair
            finally:
                sampling.cancel()
                repair.cancel()
            judged_copies = await arena.judge_and_restore(ledgers)
    ended_s = measure.gone_at_s + measure.whole_s
    return PaceRecord(
        spans=[
            Span(
                begin_s=begin_s - began_s,
                copied_mb_per_s=_rate(samples, begin_s, begin_s + SPAN_S) / 1e6,
                slowest_add_ms=next(
                    (each.max_ms for at_s, each in latencies if begin_s <= at_s < begin_s + SPAN_S),
                    0.0,
                ),
            )
            for begin_s in _steps(began_s, ended_s)
        ],
        writer_began_s=writer_began_s - began_s,
        writer_ended_s=writer_ended_s - began_s,
        judged_copies=judged_copies,
    )


def _writer(arena: Arena) -> PacedWriter:
    return PacedWriter(arena.cluster.metadata_service_uri, avoid=arena.victim)


async def _sample(pid: int, samples: list[tuple[float, int]]) -> None:
    while True:
        samples.append((time.monotonic(), written_bytes(pid)))
        await asyncio.sleep(SAMPLE_S)


async def _begun_s(samples: Sequence[tuple[float, int]]) -> float:
    """Wait for the first copies and return their time."""
    deadline_s = time.monotonic() + BEGIN_TIMEOUT_S
    while not samples or samples[-1][1] - samples[0][1] < BEGUN_BYTES:
        if time.monotonic() > deadline_s:
            raise UnavailableError("nothing is copied")
        await asyncio.sleep(SAMPLE_S)
    return samples[-1][0]


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


# --- The picture ----------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP = 860, 70, 20, 50
PANEL, GAP, BOTTOM = 180, 40, 40


def pace_plot(record: PaceRecord) -> str:
    """Return an SVG with two panels: the copied bytes, and the writer's slowest adds."""
    end_s = record.spans[-1].begin_s + SPAN_S
    x_of = _scale(end_s, LEFT, WIDTH - RIGHT)
    lower = TOP + PANEL + GAP
    began, ended = x_of(record.writer_began_s), x_of(record.writer_ended_s)
    forgotten = x_of(min(end_s, record.writer_ended_s + ACTIVE_FOR_S))
    copied = [(span.begin_s, span.copied_mb_per_s) for span in record.spans]
    slowest = [(span.begin_s, span.slowest_add_ms) for span in record.spans]
    return picture(
        WIDTH,
        lower + PANEL + BOTTOM,
        [
            text(
                LEFT, 20, "One repair with default settings; time in s after the first copies", 14
            ),
            *(
                f'<rect x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" '
                f'height="{lower + PANEL - TOP}" fill="{fill}"/>'
                for begin, end, fill in ((began, ended, "#fdd"), (ended, forgotten, "#fee"))
            ),
            text(began + 4, TOP - 6, "a client writes", 11),
            text(ended + 4, TOP - 6, f"still treated as active for {ACTIVE_FOR_S:g} s", 11),
            *_panel(copied, "copied, MB/s", TOP, end_s, "#4e79a7"),
            *_panel(slowest, "slowest add, ms", lower, end_s, "#e15759"),
            *(
                text(x_of(at_s), lower + PANEL + 18, f"{at_s}", 11, anchor="middle")
                for at_s in range(0, int(end_s) + 1, 2)
            ),
        ],
    )


def _panel(
    points: Sequence[tuple[float, float]], title: str, top: float, end_s: float, colour: str
) -> Iterator[str]:
    highest = max(1.0, *(value for _, value in points))
    x_of, y_of = _scale(end_s, LEFT, WIDTH - RIGHT), _scale(highest, top + PANEL, top)
    base = top + PANEL
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="#888"/>'
    yield text(LEFT - 6, top + 10, f"{highest:,.0f}", 11, anchor="end")
    yield text(LEFT - 6, top + PANEL, "0", 11, anchor="end")
    yield text(LEFT + 4, top + 12, title, 11)
    corners = [
        f"{x_of(at_s):.1f},{y_of(value):.1f}"
        for begin_s, value in points
        for at_s in (begin_s, begin_s + SPAN_S)
    ]
    style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
    yield f'<polyline points="{" ".join(corners)}" {style}/>'


def _scale(highest: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * value / highest


def write_pace(record: PaceRecord, folder: Path) -> None:
    (folder / "pace.json").write_bytes(msgspec.json.encode(record) + b"\n")
    (folder / "pace.svg").write_text(pace_plot(record))
