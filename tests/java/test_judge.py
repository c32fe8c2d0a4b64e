"""The judge's command, as far as it needs no cluster."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.local.ports import free_ports
from ledgers.codec.layout import MetadataUri
from ledgers.errors import SettingsError
from tests.java import judge
from tests.java.messages import BadCopy, LedgerVerdict, Summary, Verdict


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no URI"),
        pytest.param(["http://127.0.0.1:2181/ledgers"], id="not a metadata service URI"),
        pytest.param(["zk+btree://127.0.0.1:2181/ledgers"], id="an unknown layout"),
        pytest.param(["zk://127.0.0.1:2181/ledgers", "--ledgers", "1,two"], id="a malformed id"),
        pytest.param(["zk://127.0.0.1:2181/ledgers", "--expect", "nowhere"], id="no such file"),
        pytest.param(["zk://127.0.0.1:2181/ledgers", "--expect", __file__], id="not JSON lines"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    command = CliRunner().invoke(judge.main, arguments)

    assert command.exit_code == 2
    assert command.stderr


def test_a_uri_without_a_zookeeper_server_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "ZOOKEEPER_TIMEOUT_S", 0.2)
    (port,) = free_ports(1)

    with pytest.raises(SettingsError, match=f"no ZooKeeper answers.*{port}"):
        judge.check_cluster(f"zk://127.0.0.1:{port}/ledgers")


def test_java_gets_a_uri_that_it_understands() -> None:
    where = MetadataUri.parse("'metadata-store:zk:h1:2181,h2:2181/c1'")

    assert judge.java_uri(where) == "zk+null://h1:2181;h2:2181/c1/ledgers"


def test_a_missing_java_compiler_is_one_line_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "bin" / "java"
    runtime.parent.mkdir()
    runtime.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    runtime.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    command = CliRunner().invoke(judge.main, ["zk://127.0.0.1:2181/ledgers"])

    assert command.exit_code == 2
    (line,) = command.stderr.splitlines()
    assert line.startswith("judge: no Java compiler found: install a JDK, 17 or later")


LEDGER = LedgerVerdict(
    ledger=7,
    verdict=Verdict.MISSING,
    copies=1_500,
    good=400,
    gone_bookies=("bookie-3:3181",),
    problems={"bookie-gone": 1_000, "absent": 100},
    examples=(BadCopy(entry=5, bookie="bookie-1:3181", problem="absent"),),
)


def test_a_ledger_with_missing_copies_is_one_line() -> None:
    assert judge.describe_ledger(LEDGER) == (
        "ledger 7 (missing): 400 of 1,500 copies are good; 1,000 bookie-gone; 100 absent; "
        "not registered: bookie-3:3181; e.g. entry 5 on bookie-1:3181"
    )


def test_a_ledger_that_cannot_be_opened_is_shown_with_its_error() -> None:
    ledger = LedgerVerdict(
        ledger=7,
        verdict=Verdict.UNKNOWN,
        error="BKReadException",
        gone_bookies=(),
        problems={},
        examples=(),
    )

    assert judge.describe_ledger(ledger) == "ledger 7 (unknown): BKReadException"


def test_the_verdict_is_the_last_line_of_the_summary() -> None:
    summary = Summary(
        verdict=Verdict.UNKNOWN,
        ledgers={Verdict.WHOLE: 1_999, Verdict.MISSING: 0, Verdict.UNKNOWN: 1},
        contents={Verdict.WHOLE: 3, Verdict.MISSING: 0, Verdict.UNKNOWN: 1},
        entries=20_000,
        copies=60_000,
        good=59_990,
    )

    assert list(judge.describe_summary(summary, elapsed_s=2.34)) == [
        "2,000 ledgers in 2.3 s: 1,999 whole, 0 with copies missing, 1 unknown",
        "60,000 copies of 20,000 entries: 59,990 good",
        "3 of 4 contents are as expected",
        "verdict: could not tell: some copies could not be read",
    ]
