"""``bookmender completion``: prints the script that completes commands in a shell."""

import click
from click.shell_completion import get_completion_class

VARIABLE = "_BOOKMENDER_COMPLETE"
"""The variable by which click's scripts ask the program for completions."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    \b
      source <(bookmender completion bash)                     # in ~/.bashrc
      source <(bookmender completion zsh)                      # in ~/.zshrc, after compinit
      bookmender completion fish > ~/.config/fish/completions/bookmender.fish

    It completes commands, options and bookie IDs. Bookie IDs are read from the cluster that the
    environment names.
    """
    script = get_completion_class(shell)
    assert script is not None, shell
    root = ctx.find_root()
    click.echo(script(root.command, {}, "bookmender", VARIABLE).source())
