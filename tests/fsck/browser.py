"""Open a report in headless Chromium, as a person would."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

from ledgers.errors import SettingsError, UnavailableError

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0
_COUNTED = re.compile(r"ledgers|verdict-.*|finding-.*")


def find_chromium() -> str:
    """Return the path of Chromium. Raise SettingsError with advice if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise SettingsError(
            "Chromium is needed to open the page: install it (Debian: apt install chromium)"
        )
    return found


def counts_shown(page: Path, *, screenshot: Path) -> dict[str, int]:
    """Return the counts of the page by element id, as Chromium renders it without a network."""
    counts = _Counts()
    counts.feed(_chromium("--dump-dom", page.as_uri()))
    _chromium(f"--screenshot={screenshot}", "--window-size=1200,2400", page.as_uri())
    if not screenshot.exists():
        raise UnavailableError(f"Chromium took no picture of {page}")
    return counts.found


def _chromium(*arguments: str) -> str:
    with TemporaryDirectory(prefix="fsck-chromium-") as profile:
        command = [
            find_chromium(),
            "--headless=new",
            "--no-sandbox",  # root cannot use the sandbox, and the page is our own
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            *arguments,
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise UnavailableError(f"Chromium cannot open the report: {error}") from error
    return done.stdout


class _Counts(HTMLParser):
    """Elements with an id and a ``data-count``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name, count = given.get("id"), given.get("data-count")
        if name is not None and count is not None and _COUNTED.fullmatch(name):
            self.found[name] = int(count)
