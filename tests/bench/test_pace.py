"""The plot of the pace as a writer starts and stops."""

import xml.etree.ElementTree as ElementTree

from bench.pace import PaceRecord, Span, pace_plot

RECORD = PaceRecord(
    spans=[
        Span(begin_s=0.0, copied_mb_per_s=50.0, slowest_add_ms=0.0),
        Span(begin_s=0.5, copied_mb_per_s=12.0, slowest_add_ms=8.0),
        Span(begin_s=1.0, copied_mb_per_s=50.0, slowest_add_ms=0.0),
    ],
    writer_began_s=0.5,
    writer_ended_s=1.0,
    judged_copies=9,
)


def test_the_plot_is_an_image_with_a_panel_for_each_side() -> None:
    picture = ElementTree.fromstring(pace_plot(RECORD))

    lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [6, 6]


def test_a_faster_pace_is_drawn_higher() -> None:
    picture = ElementTree.fromstring(pace_plot(RECORD))

    copied = picture.find("{http://www.w3.org/2000/svg}polyline")
    assert copied is not None
    heights = [float(point.split(",")[1]) for point in copied.attrib["points"].split()]
    assert heights[0] == heights[4] < heights[2]
