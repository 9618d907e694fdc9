"""`ratchet completion bash|zsh|fish`: the lines that make a shell complete `ratchet`, its subcommands and their options."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what to put into the shell's configuration.

    In ~/.bashrc: eval "$(ratchet completion bash)"; in ~/.zshrc the same with zsh; for fish:
    ratchet completion fish > ~/.config/fish/completions/ratchet.fish
    """
    kind, root = get_completion_class(shell), click.get_current_context().find_root().command
    assert kind is not None, "click knows these three"
    click.echo(kind(root, {}, "ratchet", "_RATCHET_COMPLETE").source())
