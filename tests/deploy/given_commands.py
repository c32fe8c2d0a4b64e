"""Command lines that files and documents name, checked against the command line interface."""

from collections.abc import Sequence

import click

from daemon.cli.main import cli


def refusal(arguments: Sequence[str]) -> str | None:
    """Return why ``bookmender ARGUMENTS`` would be refused; None if the command and its options
    exist. Nothing is run, and values are not checked."""
    command: click.Command = cli
    context = click.Context(cli)
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        if found is None:
            return f"there is no command {' '.join(arguments)}"
        command, context = found, click.Context(found, parent=context)
        rest.pop(0)
    try:
        command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return error.format_message()
    return None
