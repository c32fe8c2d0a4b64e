"""Draws the results: the first and the last mark by the number of ledgers, with both axes
logarithmic."""

from collections.abc import Callable, Iterator, Sequence

from bench.audit.records import (
    Loss,
    Record,
    losses_of,
    median_all_s,
    median_first_s,
    sizes_of,
)
from bench.audit.turns import CONTENDERS
from bench.svg import LogAxis, picture, text

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 60, 50
TIMES_S = (0.01, 0.1, 1.0, 10.0, 100.0)
COLOURS = ("#b07aa1", "#4e79a7")
"""Colours of the contenders, in their order."""
LINES: tuple[tuple[str, str, Callable[[Sequence[Loss]], float | None]], ...] = (
    ("all marks", "", median_all_s),
    ("first mark", ' stroke-dasharray="5 4"', median_first_s),
)


def plot(records: Sequence[Record]) -> str:
    """Return an SVG; only a frame if nothing was measured."""
    sizes = sizes_of(records) or [10_000, 1_000_000]
    x = LogAxis(low=sizes[0], high=max(sizes[-1], 10 * sizes[0]), start=LEFT, end=WIDTH - RIGHT)
    y = LogAxis(low=TIMES_S[0], high=TIMES_S[-1], start=HEIGHT - BOTTOM, end=TOP)
    return picture(WIDTH, HEIGHT, [*_frame(sizes, x, y), *_curves(records, sizes, x, y)])


def _frame(sizes: Sequence[int], x: LogAxis, y: LogAxis) -> Iterator[str]:
    yield text(LEFT, 24, "From the end of the bookie's znode to its ledgers' marks, in s", 14)
    for time_s in TIMES_S:
        at = y.at(time_s)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
        yield text(LEFT - 8, at + 4, f"{time_s:g}", anchor="end")
    for size in sizes:
        yield text(x.at(size), HEIGHT - BOTTOM + 20, f"{size:,}", anchor="middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "ledgers in the cluster", anchor="middle")


def _curves(
    records: Sequence[Record], sizes: Sequence[int], x: LogAxis, y: LogAxis
) -> Iterator[str]:
    for contender, colour in zip(CONTENDERS, COLOURS, strict=True):
        for title, dashes, pick in LINES:
            times_s = {size: pick(losses_of(records, size, contender.name)) for size in sizes}
            points = [(x.at(s), y.at(t)) for s, t in times_s.items() if t is not None]
            if not points:
                continue
            joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            style = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
            yield f'<polyline points="{joined}" {style}/>'
            for px, py in points:
                yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"/>'
            end_x, end_y = points[-1]
            last_s = [t for t in times_s.values() if t is not None][-1]
            yield text(end_x + 10, end_y + 4, f"{contender.title}, {title}: {last_s:.3g}")
