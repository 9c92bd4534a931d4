"""`pdactors`: the command line. Each command lives in a module of its own and is imported when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from pdactors.cli import interrupt
from pdactors.cli.conceal import conceal
from pdactors.errors import PDError
from pdactors.version import VERSION

COMMANDS = {
    "launch": ("pdactors.cli.launch", "Start a cluster and stay until it ends."),
    "generate": ("pdactors.cli.generate", "Stream one answer."),
    "chat": ("pdactors.cli.chat", "Talk with the model in the terminal."),
    "status": ("pdactors.cli.status", "Show every actor of a running cluster."),
    "top": ("pdactors.cli.top", "Watch a running cluster."),
    "trace": ("pdactors.cli.trace", "Show where the time of one request went, over all actors."),
    "drain": ("pdactors.cli.drain", "Give an engine no new work, let it finish, and stop it."),
    "scale": ("pdactors.cli.scale", "Start or drain engines until a node has so many."),
    "verify": ("pdactors.cli.verify", "Compare greedy tokens with transformers, token by token."),
    "leaks": ("pdactors.cli.leaks", "Look for leases, blocks and processes that are held for nobody."),
    "chaos": ("pdactors.cli.chaos", "Hurt a cluster while it answers, and check every answer."),
    "bench": ("pdactors.cli.bench", "Measure, each figure beside its reference."),
    "calibrate": ("pdactors.cli.calibrate", "Measure what steps and transfers cost here, for `simulate`."),
    "simulate": ("pdactors.cli.simulate", "Predict what `bench serve` would measure."),
    "plan": ("pdactors.cli.plan", "Find the cheapest cluster that holds a rate within an objective."),
    "model": ("pdactors.cli.model", "Fetch and list models."),
    "config": ("pdactors.cli.config", "Show the effective cluster file."),
    "keys": ("pdactors.cli.keys", "Make keys and tokens for a cluster that others can reach."),
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is used, so that help and completion are quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with interrupt.ends_at_once():
            command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Turn our errors into one line and exit status 1, Ctrl-C into 130; click's own usage errors exit with 2."""
        conceal(sys.argv)
        try:
            return super().invoke(ctx)
        except PDError as error:
            click.echo(f"error: {error.message}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal wrote ^C
            ctx.exit(interrupt.STATUS)


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `pdactors launch`, then ask: `pdactors generate 'What is the capital of France?'`",
)
@click.version_option(VERSION, prog_name="pdactors")
def main() -> None:
    """Serve language models with prefill and decode separated."""


if __name__ == "__main__":
    sys.exit(main(prog_name="pdactors"))
