"""The documents' commands exist, and those in code blocks work as printed."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from daemon.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "bench" / "README.md",
]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands_in(text: str) -> Iterator[str]:
    """Yield the arguments of each ``bookmender`` in code: `in backticks`, and in blocks."""
    inline = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    for code in (*inline, *lines_of_blocks(text)):
        if found := re.match(r"\s*(?:[\w/.]+/)?bookmender +([a-z-].*)", code, re.DOTALL):
            yield " ".join(found[1].split())


def lines_of_blocks(text: str) -> list[str]:
    """Return the lines of the code blocks. Those that are continued are joined."""
    blocks = FENCED.findall(text)
    return [line.strip() for b in blocks for line in re.sub(r"\\\n\s*", "", b).splitlines()]


def wrong_in(line: str) -> str:
    """Return what is wrong with these arguments of ``bookmender``; empty if they exist."""
    arguments = shlex.split(re.split(r"[|>]|&&|;", line)[0], comments=True)
    command: click.Command = cli
    context = click.Context(cli, info_name="bookmender")
    try:
        while True:
            given, arguments, _ = command.make_parser(context).parse_args(arguments)
            for param in command.params:
                value = given.get(param.name or "")
                if (
                    isinstance(param.type, click.Choice)
                    and isinstance(value, str)
                    and value.islower()
                ):
                    param.type.convert(value, param, context)
            if not isinstance(command, click.Group) or not arguments:
                return f"too many: {arguments}" if arguments else ""
            name, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command, context = found, click.Context(found, info_name=name, parent=context)
    except click.ClickException as error:
        return error.format_message()


@pytest.mark.parametrize(
    ("line", "is_wrong"),
    [
        pytest.param("bookie drain ID1 ID2 --wait", False, id="placeholders"),
        pytest.param("ledger show", False, id="without its arguments"),
        pytest.param("status -o json | jq .health # comment", False, id="within a pipe"),
        pytest.param("status --explain-all", True, id="no such option"),
        pytest.param("status -o yaml", True, id="no such value"),
        pytest.param("queue list", True, id="a name of an earlier release"),
    ],
)
def test_wrong_commands_are_found(line: str, is_wrong: bool) -> None:
    assert bool(wrong_in(line)) is is_wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_a_document_names_exists(document: Path) -> None:
    found = {line: wrong for line in commands_in(document.read_text()) if (wrong := wrong_in(line))}

    assert found == {}


# --- The code blocks, on a local cluster that the commands find by themselves ---------------------

ENDLESS = ("bookmender daemon", "bookmender feed follow", "bookmender notify serve")
"""They run until the end. Then Ctrl-C ends them as it should."""
CHECKING = ("bookmender status", "bookmender doctor", "bookmender config check")
"""They exit with 1 if they find something."""
ELSEWHERE = ("notify watch", "fsck run", "fsck mark", "spark", "/var/lib/", "--secured")
"""In other tests: on Spark, as root, or with TLS."""
FILES = {
    "backup.sh": "#!/bin/sh\n",
    "bk_server.conf": "metadataServiceUri={uri}\nzkLedgersRootPath=/ledgers\n",
}
"""Files that a reader of the documents has."""
WAIT_S = 240.0


class Reader:
    """A user who types the commands of the documents, with a home folder of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
        self._environment = kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BOOKMENDER_HTTP_PORT": "0",  # other nodes may run on this machine
            **{f"XDG_{name}_HOME": str(home / name) for name in ("DATA", "CONFIG", "STATE")},
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def type(self, line: str) -> None:
        """Type the line, and expect its success."""
        line = re.sub(r"\bID\b", self._a_bookie, line)
        if line.startswith(ENDLESS):
            command = shlex.split(line, comments=True)
            with (self.home / "endless.log").open("ab") as log:
                child = subprocess.Popen(
                    command, env=self._environment, cwd=self.home, stdout=log, stderr=log
                )
            self.running.append(child)
            return
        allowed = (0, 1) if line.startswith(CHECKING) else (0,)
        until_s = time.monotonic() + (WAIT_S if "# after " in line else 0)
        while (ended := self._run(line)).returncode not in allowed:
            assert time.monotonic() < until_s, f"{line}\n{ended.stdout}{ended.stderr}"

    def interrupt_all(self) -> list[int]:
        for child in self.running:
            child.send_signal(signal.SIGINT)
        return [child.wait(WAIT_S) for child in self.running]

    def _run(self, line: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", line],
            env=self._environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def _a_bookie(self, _: object) -> str:
        return self._run("bookmender bookie list -o ids").stdout.split()[0]

    def have_files(self) -> None:
        uri = self._run("bookmender config show -o json | grep -o 'zk+[^\"]*'").stdout.strip()
        for name, text in FILES.items():
            (self.home / name).write_text(text.format(uri=uri))
            (self.home / name).chmod(0o755)


@pytest.fixture
def reader(_prerequisites: None) -> Iterator[Reader]:
    with tempfile.TemporaryDirectory(prefix="docs-") as home:  # short, for the path of a socket
        reader = Reader(Path(home))
        try:
            yield reader
        finally:
            for child in reader.running:
                child.kill()
                child.wait()
            reader._run("bookmender local down --delete")


def is_typed(line: str) -> bool:
    return line.startswith("bookmender ") and not any(each in line for each in ELSEWHERE)


@pytest.mark.cluster
@pytest.mark.long(group="commands")
@pytest.mark.timeout(900)
def test_the_code_blocks_work_as_printed(reader: Reader) -> None:
    (*first, last), *others = (
        [line for line in lines_of_blocks(document.read_text()) if is_typed(line)]
        for document in DOCUMENTS
    )
    assert last.startswith("bookmender local down")

    for line in first:
        reader.type(line)
    reader.have_files()
    for line in (line for lines in others for line in lines):
        reader.type(line)
    endings = reader.interrupt_all()
    reader.type(last)

    assert endings == [130 if "follow" in str(child.args) else 0 for child in reader.running]
