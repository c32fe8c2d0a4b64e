"""docs/feed.md shows the example that tests/cluster/test_feed_commands.py runs."""

import re
from pathlib import Path

import click

from daemon.cli.feed import feed

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "feed.md").read_text()


def test_the_page_shows_the_example() -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)

    assert (DOCS / "examples" / "catalogue.py").read_text() in shown


def test_the_table_names_options_of_follow() -> None:
    follow = feed.get_command(click.Context(feed), "follow")
    assert follow is not None
    named = set(re.findall(r"^\| `(--[a-z-]+)", PAGE, flags=re.MULTILINE)) - {"--store"}

    assert named <= {option for each in follow.params for option in each.opts}
