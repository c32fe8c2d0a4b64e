"""Run the command ``bookmender`` as a user would."""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.steps import WAIT_S
from tests.forked import run


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The output of a command, and its exit code."""

    exit_code: int
    out: str
    err: str

    @property
    def record(self) -> Any:
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """Return the only line on standard error."""
        assert self.out == ""
        (line,) = self.err.splitlines()
        return line


async def bookmender(
    uri: str | None,
    *arguments: str,
    state: Path | None = None,
    settings: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Said:
    """Run the command. ``state``: where a daemon may keep its journal. ``settings``: without their
    prefix, as in ``SECURITY_BOOKIE_TLS``. ``variables``: other variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    environment["BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S"] = "1"
    # Independent of the disk of this machine.
    environment["BOOKMENDER_REPLICATION_FREE_DISK_SHARE_MIN"] = "0"
    if uri is not None:
        environment["BOOKMENDER_METADATA_SERVICE_URI"] = uri
    if state is not None:
        environment["BOOKMENDER_NODE_STATE_DIR"] = str(state)
    environment |= {f"BOOKMENDER_{key}": value for key, value in (settings or {}).items()}
    environment |= variables or {}
    ended = await asyncio.to_thread(run, ["daemon", *arguments], environment, timeout_s=WAIT_S)
    return Said(exit_code=ended.returncode, out=ended.stdout, err=ended.stderr)


def has_condition(status: Any, code: str, severity: str) -> bool:
    """Return True if a condition holds. ``status``: the JSON of ``bookmender status``."""
    return (code, severity) in [(each["code"], each["severity"]) for each in status["conditions"]]
