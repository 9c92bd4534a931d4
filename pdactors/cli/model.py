"""`pdactors model`."""

from __future__ import annotations

import json

import click

from pdactors.config.memory import format_size


@click.group("model")
def command() -> None:
    """Fetch and list models, kept under $PDACTORS_HOME/models."""


@command.command("fetch", epilog="Example:  pdactors model fetch smollm2-135m")
@click.argument("name")
def fetch(name: str) -> None:
    """Get NAME (a bundled model, a Hub id, or a .gguf file to convert), verify it, and print where it is."""
    from pdactors.engine import store

    with store.progress_bar() as progress:
        is_file = name.endswith(".gguf")
        folder = store.resolve(name, fetch=True, progress=progress) if is_file else store.fetch(name, progress=progress)
    click.echo(str(folder))


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_models(as_json: bool) -> None:
    """Show what is cached."""
    from pdactors.engine import store

    models = store.list_models()
    if as_json:
        rows = [{"name": m.name, "path": str(m.path), "size_bytes": m.size_bytes, "source": m.source} for m in models]
        click.echo(json.dumps({"models": rows}))
        return
    for model in models:
        click.echo(f"{model.name}  {format_size(model.size_bytes)}  {model.path}  from {model.source}")
    if not models:
        click.echo("no models are cached; get one with `pdactors model fetch smollm2-135m`", err=True)
