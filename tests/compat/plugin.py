"""A pytest plugin: ``-p tests.compat.plugin --compat-evidence FILE`` records the claims of markers.

With ``--collect-only`` the file has no outcomes.
"""

from pathlib import Path

import pytest

from tests.compat.evidence import Claim, Witness, write_evidence


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compat-evidence",
        type=Path,
        metavar="FILE",
        help="write there which tests claim what of compatibility, and how they ended",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--compat-evidence")
    if path is not None:
        config.pluginmanager.register(_Collector(path), "compat-collector")


class _Collector:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._items: list[pytest.Item] = []
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)  # after pytest has deselected tests
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._items = [item for item in items if item.get_closest_marker("compat")]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the worst outcome of set-up, call and clean-up."""
        if report.outcome != "passed" or report.when == "call":
            self._outcomes.setdefault(report.nodeid, report.outcome)
        if report.failed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        witnesses = [_witness(item, self._outcomes.get(item.nodeid)) for item in self._items]
        write_evidence(self._path, witnesses)


def _witness(item: pytest.Item, outcome: str | None) -> Witness:
    file, _, name = item.nodeid.partition("::")
    test, _, parameters = name.partition("[")
    return Witness(
        file=file,
        test=test,
        parameters=parameters.removesuffix("]"),
        is_on_bookies=item.get_closest_marker("cluster") is not None,
        claims=tuple(Claim(rows=mark.args, **mark.kwargs) for mark in item.iter_markers("compat")),
        outcome=outcome,
    )
