"""Options that several commands share, and how they find the cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import click

from pdactors.actors.discovery import Ready, read_ready_file, the_only_one
from pdactors.config.cluster import Mode
from pdactors.errors import ConnectionLost

if TYPE_CHECKING:
    from pdactors.client import Client

KEY = "pdactors.key"  # in a command's context
F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def config_options(function: F) -> F:
    """Add the cluster FILE and `--set`."""
    function = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key, e.g. kv.memory=1GiB. May be repeated.",
    )(function)
    return click.argument("file", type=FILE, required=False)(function)


def parse_modes(_ctx: click.Context, _option: click.Parameter, text: str) -> tuple[Mode, ...]:
    """Read a list of modes, as an option's callback; empty for none."""
    modes = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = get_args(Mode)
    for mode in modes:
        if mode not in known:
            raise click.BadParameter(f"{mode!r} is none of {', '.join(known)}")
    return cast("tuple[Mode, ...]", modes)


def cluster_options(function: F) -> F:
    """Add the options that say which running cluster is meant, and how to be let in."""
    function = click.option(
        "--key",
        metavar="FILE",
        default="",
        expose_value=False,
        callback=lambda ctx, _option, value: ctx.meta.__setitem__(KEY, value),
        help="Your key where security.curve is on, beside cluster.pub; found for clusters of this machine.",
    )(function)
    function = click.option(
        "--token", envvar="PDACTORS_SECURITY_TOKEN", default="", show_envvar=True, help="Where the cluster wants one."
    )(function)
    function = click.option(
        "--ready-file", type=FILE, help="The file that `launch --ready-file` wrote; says which cluster is meant."
    )(function)
    return click.option("--zmq", metavar="ADDRESS", help="The cluster's ZeroMQ address, e.g. tcp://127.0.0.1:7071.")(
        function
    )


def connect(zmq: str | None, ready_file: Path | None, token: str) -> Client:
    """Connect to the cluster that is meant: the named one, or the only one that runs here.

    Raises:
        ConnectionLost: there is none, or several, or it has no ZeroMQ socket, or does not answer.
        Unauthorized: the token is wrong.
        ConfigError: the key cannot be read.
    """
    from pdactors.client import Client

    key = click.get_current_context().meta[KEY]
    if zmq:
        return Client(zmq if "://" in zmq else f"tcp://{zmq}", token=token, key=key)
    ready: Ready = read_ready_file(ready_file) if ready_file else the_only_one()
    if not ready.zmq:
        raise ConnectionLost(f"cluster {ready.run_id} has no ZeroMQ socket that can be reached from here (listen.zmq)")
    return Client(ready.zmq, token=token, key=key or ready.key)
