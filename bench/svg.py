"""The parts of SVG that our plots use."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a complete SVG file with a white background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, content: str, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAxis:
    """A logarithmic axis from value ``low`` at pixel ``start`` to ``high`` at ``end``. Values below
    ``low`` are shown at ``start``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        low, high = math.log10(self.low), math.log10(self.high)
        share = (math.log10(max(value, self.low)) - low) / (high - low)
        return self.start + share * (self.end - self.start)
