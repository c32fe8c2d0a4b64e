"""A local cluster starts on a busy machine, too."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from daemon.local.servers import Servers
from ledgers.errors import UnavailableError

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="local"), pytest.mark.timeout(360)]


def ending_with(complaint: str, folder: Path) -> Child:
    program = f"print('12:00 ERROR [main] {complaint}'); raise SystemExit(2)"
    return Child("bookie", [sys.executable, "-c", program], log=folder / "bookie.log")


@pytest.mark.parametrize(
    ("complaint", "is_started"),
    [("ConnectionLossException", True), ("no disk space", False)],
)
def test_a_bookie_without_answer_of_zookeeper_starts_again(
    make_cluster: Callable[..., LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    complaint: str,
    is_started: bool,
) -> None:
    cluster = make_cluster(bookies=1)
    (bookie,) = cluster.bookies
    cluster.kill(bookie)
    start, starts = Servers.bookie, []

    def start_or_end(*arguments: Any) -> Child:
        starts.append(arguments)
        return ending_with(complaint, tmp_path) if len(starts) == 1 else start(*arguments)

    monkeypatch.setattr(Servers, "bookie", start_or_end)
    if is_started:
        cluster.start_bookie(bookie)
        assert cluster.pid(bookie) is not None
    else:
        with pytest.raises(UnavailableError, match=complaint):
            cluster.start_bookie(bookie)
    assert len(starts) == (2 if is_started else 1)
