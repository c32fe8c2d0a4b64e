"""What commands say, kept in files: ``said/NAME.txt`` beside the test, one for each command.

A test makes texts of five to eight scenes, and asserts facts (codes, data, names) itself. After a
change of wording, ``pytest --update tests/...`` writes the files again, and their difference is
reviewed like code.
"""

from collections.abc import Callable, Mapping

import pytest

Said = Callable[[str, Mapping[str, str]], None]
"""Compares the text of each scene with the file of this name."""


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Said:
    def compare(name: str, scenes: Mapping[str, str]) -> None:
        path = request.path.parent / "said" / f"{name}.txt"
        text = "\n".join(f"=== {scene}\n{told.rstrip()}\n" for scene, told in scenes.items())
        if request.config.getoption("--update"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"pytest --update writes {path.name} again"

    return compare
