"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# No deadline: a busy machine is no failure. A failing example prints the blob that replays it.
settings.register_profile("bookmender", deadline=None, print_blob=True)
settings.load_profile("bookmender")


@pytest.fixture(autouse=True)
def fresh_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees how another one set up the logs, as it would where loggers are kept for good."""
    configure = structlog.configure
    monkeypatch.setattr(
        structlog,
        "configure",
        lambda **given: configure(**given | {"cache_logger_on_first_use": False}),
    )
    yield
    structlog.reset_defaults()
