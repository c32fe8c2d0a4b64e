"""Call the command ``bookmender`` in this process."""

import sys

import click
import pytest

from daemon.cli.main import CommandGroup, main


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bookmender", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    assert isinstance(exited.value.code, int)
    return exited.value.code


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Install a command ``fail`` that raises the error."""

    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(CommandGroup, "get_command", lambda group, ctx, name: fail)
