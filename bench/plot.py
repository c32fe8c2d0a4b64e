"""The results as a picture: how long each contender took for each load, on a logarithmic scale."""

import math
from collections.abc import Iterable, Iterator
from html import escape

from bench.contenders import CONTENDERS
from bench.figures import WHOLE_S, Figures, Summary
from bench.loads import LOADS
from bench.runs import Pass, Run

COLOURS = ("#b07aa1", "#e15759", "#76b7b2", "#4e79a7")
"""Of the contenders, in their order."""
WIDTH, LEFT, RIGHT = 860, 230, 70
BAR, GAP, TOP, BOTTOM = 13, 16, 66, 34
DECADES = (0.1, 1.0, 10.0, 100.0)


def plot(runs: Iterable[Run]) -> str:
    """An SVG: a bar to the median, a tick at the best."""
    figures = Figures(runs)
    times = {
        (load, contender.name): WHOLE_S.summary(found)
        for load in LOADS
        for contender in CONTENDERS
        if (found := figures.of(Pass.ALONE, load, contender.name))
    }
    shown = [load for load in LOADS if any(load == of for of, _ in times)]
    height = TOP + len(shown) * (len(CONTENDERS) * BAR + GAP) + BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            _text(LEFT, 20, "From the end of the bookie's znode to whole, in s (logarithmic)", 14),
            *_legend(),
            *_grid(height - BOTTOM),
            *(line for row, load in enumerate(shown) for line in _load(row, load, times)),
            "</svg>\n",
        ]
    )


def _load(row: int, load: str, times: dict[tuple[str, str], Summary]) -> Iterator[str]:
    top = TOP + row * (len(CONTENDERS) * BAR + GAP)
    middle = top + len(CONTENDERS) * BAR / 2 + 4
    yield _text(LEFT - 8, middle, f"{load}: {LOADS[load].title}", 11, anchor="end")
    for place, (contender, colour) in enumerate(zip(CONTENDERS, COLOURS, strict=True)):
        summary = times.get((load, contender.name))
        if summary is None:
            continue
        y, end, best = top + place * BAR, _x(summary.median), _x(summary.best)
        yield f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 2}" fill="{colour}"/>'
        yield f'<rect x="{best - 1:.1f}" y="{y}" width="2" height="{BAR - 2}" fill="black"/>'
        yield _text(end + 5, y + BAR - 3, f"{summary.median:.2f}", 10)


def _legend() -> Iterator[str]:
    for place, (contender, colour) in enumerate(zip(CONTENDERS, COLOURS, strict=True)):
        x = LEFT + place * 130
        yield f'<rect x="{x}" y="32" width="11" height="11" fill="{colour}"/>'
        yield _text(x + 16, 42, contender.title)


def _grid(bottom: float) -> Iterator[str]:
    for decade in DECADES:
        x = _x(decade)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="#ddd"/>'
        yield _text(x, bottom + 16, f"{decade:g}", anchor="middle")


def _x(seconds: float) -> float:
    low, high = math.log10(DECADES[0]), math.log10(DECADES[-1])
    share = (math.log10(max(seconds, DECADES[0])) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
