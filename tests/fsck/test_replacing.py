"""Files that exist completely or not at all."""

import os
from pathlib import Path

import pytest

from auditor.fsck.results.files import replace_file


def test_a_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.json"
    stood: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: stood.append(path.exists()))

    replace_file(path, "{}")

    assert stood == [False]
    assert [each.name for each in tmp_path.iterdir()] == ["options.json"]
    assert path.read_text() == "{}"
