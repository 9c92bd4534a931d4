"""`pdactors keys`."""

from __future__ import annotations

import json

import click

from pdactors.config.keys import CLIENT, folder_of, make_keys


@click.command("keys", epilog="Example:  pdactors keys --client alice    (alice needs alice.key and cluster.pub)")
@click.option("--dir", "folder", default="", help="The folder; by default keys in $PDACTORS_HOME (security.key_dir).")
@click.option("--client", "clients", multiple=True, help="Make a key for a client of this name, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: str, clients: tuple[str, ...], as_json: bool) -> None:
    """Make the keys for security.curve, and tokens: files that only you can read. What is there stays as it is.

    Every machine of the cluster needs the same cluster.key, cluster.pub and join_token. A client needs cluster.pub and
    its own key; the machine of the gateway lets in whose NAME.pub lies in its folder when it starts.
    """
    from pdactors.transport.zmq import make_pair

    where = folder_of(folder)
    made = make_keys(where, make_pair, tuple(dict.fromkeys((CLIENT, *clients))))
    if as_json:
        click.echo(json.dumps({"dir": str(where), "made": [str(file) for file in made]}))
        return
    for file in made:
        click.echo(f"made {file}")
    if not made:
        click.echo(f"{where} has all of them already")
    shown = f'\nkey_dir = "{where}"' if folder else ""
    click.echo(
        f'\nIn the cluster file:\n[security]\ncurve = true{shown}\ntoken_file = "{where / "token"}"\n'
        f'join_token_file = "{where / "join_token"}"'
    )
