"""`pdactors config`."""

from __future__ import annotations

from pathlib import Path

import click

from pdactors.cli.options import config_options
from pdactors.config.load import load
from pdactors.config.load import show as show_config
from pdactors.config.reference import reference as make_reference


@click.group("config")
def command() -> None:
    """Look at the cluster file."""


@command.command("show")
@config_options
def show(file: Path | None, sets: tuple[str, ...]) -> None:
    """Print FILE as it takes effect: with defaults, environment and --set; secrets are masked."""
    click.echo(show_config(load(file, sets=sets)), nl=False)


@command.command("reference")
def reference() -> None:
    """Print what every key takes, is without a setting, and means, in Markdown: docs/cluster-file.md."""
    click.echo(make_reference(), nl=False)
