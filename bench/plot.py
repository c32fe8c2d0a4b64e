"""Draws the results: the time of each contender for each load, on a logarithmic scale."""

from collections.abc import Iterable, Iterator

from bench.contenders import CONTENDERS
from bench.figures import WHOLE_S, Figures, Summary
from bench.loads import LOADS
from bench.runs import Pass, Run
from bench.svg import LogAxis, picture, text

COLOURS = ("#b07aa1", "#e15759", "#76b7b2", "#4e79a7")
"""Colours of the contenders, in their order."""
WIDTH, LEFT, RIGHT = 860, 230, 70
BAR, GAP, TOP, BOTTOM = 13, 16, 66, 34
DECADES = (0.1, 1.0, 10.0, 100.0)
AXIS = LogAxis(low=DECADES[0], high=DECADES[-1], start=LEFT, end=WIDTH - RIGHT)


def plot(runs: Iterable[Run]) -> str:
    """Return an SVG with a bar up to the median and a tick at the best run."""
    figures = Figures(runs)
    times = {
        (load, contender.name): WHOLE_S.summary(found)
        for load in LOADS
        for contender in CONTENDERS
        if (found := figures.of(Pass.ALONE, load, contender.name))
    }
    shown = [load for load in LOADS if any(load == of for of, _ in times)]
    height = TOP + len(shown) * (len(CONTENDERS) * BAR + GAP) + BOTTOM
    return picture(
        WIDTH,
        height,
        [
            text(LEFT, 20, "From the end of the bookie's znode to whole, in s (logarithmic)", 14),
            *_legend(),
            *_grid(height - BOTTOM),
            *(line for row, load in enumerate(shown) for line in _load(row, load, times)),
        ],
    )


def _load(row: int, load: str, times: dict[tuple[str, str], Summary]) -> Iterator[str]:
    top = TOP + row * (len(CONTENDERS) * BAR + GAP)
    middle = top + len(CONTENDERS) * BAR / 2 + 4
    yield text(LEFT - 8, middle, f"{load}: {LOADS[load].title}", 11, anchor="end")
    for place, (contender, colour) in enumerate(zip(CONTENDERS, COLOURS, strict=True)):
        summary = times.get((load, contender.name))
        if summary is None:
            continue
        y, end, best = top + place * BAR, AXIS.at(summary.median), AXIS.at(summary.best)
        width = f"{end - LEFT:.1f}"
        yield f'<rect x="{LEFT}" y="{y}" width="{width}" height="{BAR - 2}" fill="{colour}"/>'
        yield f'<rect x="{best - 1:.1f}" y="{y}" width="2" height="{BAR - 2}" fill="black"/>'
        yield text(end + 5, y + BAR - 3, f"{summary.median:.2f}", 10)


def _legend() -> Iterator[str]:
    for place, (contender, colour) in enumerate(zip(CONTENDERS, COLOURS, strict=True)):
        x = LEFT + place * 125
        yield f'<rect x="{x}" y="32" width="11" height="11" fill="{colour}"/>'
        yield text(x + 16, 42, contender.title)


def _grid(bottom: float) -> Iterator[str]:
    for decade in DECADES:
        x = AXIS.at(decade)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="#ddd"/>'
        yield text(x, bottom + 16, f"{decade:g}", anchor="middle")
