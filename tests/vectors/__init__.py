"""Golden vectors: bytes and answers that Apache BookKeeper itself gave (see README.md here)."""

import json
from pathlib import Path
from typing import Any

Case = dict[str, Any]


def cases(name: str) -> list[Case]:
    """The cases of ``<name>.json``."""
    content = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    found: list[Case] = content["cases"]
    assert found, name
    return found
