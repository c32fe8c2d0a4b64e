"""The documents: pages that the code writes, and what the others say of commands and settings."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import yaml

from daemon.pages import PAGES
from daemon.settings import Settings
from daemon.settings_file import docstrings
from daemon.status.conditions import CONDITIONS
from tests.daemon.settings_given import URI
from tests.deploy.given_commands import refusal

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
WRITTEN_BY_HAND = ("install", "moving", "faq", "feed")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    page = (DOCS / name).read_text()

    assert PAGES[name](page) == page, "make docs writes it"


def test_the_runbook_has_every_condition() -> None:
    headings = re.findall("^## (.+)$", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE)

    assert headings == [*CONDITIONS, "After a restore of ZooKeeper"]


def test_docstrings_are_found_below_their_fields() -> None:
    assert docstrings(Example) == {"first": "Of the first, on two lines.", "second": ""}


@dataclasses.dataclass
class Example:
    """Read as source."""

    first: int = 0
    """Of the first,
    on two lines."""
    second: int = 0

    def __post_init__(self) -> None:
        """Of no field."""


@pytest.mark.parametrize("name", WRITTEN_BY_HAND)
def test_commands_in_the_documents_exist(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    inline = re.findall(r"`bookmender ([^`]+)`", text)
    blocks = "".join(re.findall("^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    in_blocks = re.findall(r"^bookmender ([^#\n]+)", blocks, flags=re.MULTILINE)
    lines = [shlex.split(line.partition("|")[0]) for line in (*inline, *in_blocks)]

    assert {shlex.join(line): why for line in lines if (why := refusal(line))} == {}


@pytest.mark.parametrize("name", WRITTEN_BY_HAND)
def test_settings_in_the_documents_exist(name: str) -> None:
    settings = dataclasses.asdict(Settings(metadata_service_uri=URI))
    sections = "|".join(key for key, value in settings.items() if isinstance(value, dict))
    named = re.findall(rf"`({sections})\.(\w+)(?: = [^`]+)?`", (DOCS / f"{name}.md").read_text())

    assert [(section, key) for section, key in named if key not in settings[section]] == []


def test_the_site_has_every_page() -> None:
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)

    assert {path.name for path in DOCS.glob("*.md")} <= set(nav)
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["font"] is False
