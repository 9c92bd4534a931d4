"""`pdactors generate`."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pdactors.cli.options import cluster_options, connect
from pdactors.config.address import parse_address
from pdactors.errors import ConnectionLost, error_for

if TYPE_CHECKING:
    from pdactors.client import Client


@click.command("generate", epilog="Example:  pdactors generate 'What is the capital of France?' --max-tokens 32")
@click.argument("prompt")
@click.option("--tcp", metavar="ADDRESS", help="Use the line protocol at this address instead of ZeroMQ.")
@cluster_options
@click.option("--raw", is_flag=True, help="Take PROMPT as it is, without the model's chat template.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
def command(
    prompt: str,
    tcp: str | None,
    zmq: str | None,
    ready_file: Path | None,
    token: str,
    raw: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send PROMPT to a running cluster and stream its answer."""
    body: dict[str, Any] = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    body |= options
    events = _over_tcp(tcp, token, body) if tcp else _over_zmq(connect(zmq, ready_file, token), body)
    pieces: list[str] = []
    ids: list[int] = []
    for event in events:
        if event["event"] == "token":
            pieces.append(event["text"])
            ids.append(event["token_id"])
            if not as_json:
                click.echo(event["text"], nl=False)
        elif as_json:
            kept = {name: event[name] for name in ("finish_reason", "usage", "timing", "path")}
            click.echo(json.dumps({"text": "".join(pieces), "token_ids": ids, **kept}, ensure_ascii=False))
        else:
            click.echo()


def _over_zmq(connected: Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with connected as client:
        for event in client.events(**body):
            yield msgspec.to_builtins(event)


def _over_tcp(address: str, token: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Speak the line protocol; yields the events up to `done`, raises what an `error` says."""
    where = parse_address(address)
    try:
        with socket.create_connection((where.host, where.port)) as connection, connection.makefile("rwb") as lines:
            if token:
                lines.write(json.dumps({"token": token}).encode() + b"\n")
            lines.write(json.dumps(body).encode() + b"\n")
            lines.flush()
            for line in lines:
                event = json.loads(line)
                if event["event"] == "error":
                    raise error_for(event["code"], event["message"], event.get("retry_after_s"))
                yield event
                if event["event"] == "done":
                    return
    except ConnectionRefusedError as error:
        raise ConnectionLost(f"nobody listens at {address}; `pdactors launch` says where it does") from error
    except OSError as error:
        raise ConnectionLost(f"{address}: {error.strerror or error}") from error
    raise ConnectionLost(f"{address} closed the connection before the answer's end")
