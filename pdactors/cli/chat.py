"""`pdactors chat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdactors.cli.options import cluster_options, connect
from pdactors.client_messages import DoneEvent

if TYPE_CHECKING:
    from pdactors.client import Client


@click.command("chat", epilog="Example:  pdactors chat --system 'You answer in one sentence.'")
@cluster_options
@click.option("--system", default="", help="A first message that says how to answer.")
@click.option("--max-tokens", type=int, default=512, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def command(
    zmq: str | None,
    ready_file: Path | None,
    token: str,
    system: str,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> None:
    """Talk with the model. The KV of earlier turns is reused; each answer says how much of it was.

    Ctrl-C ends an answer, and at the prompt the conversation; so does an empty line or the end of input.
    """

    messages = [{"role": "system", "content": system}] if system else []
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with connect(zmq, ready_file, token) as client:
        while (text := _ask()) is not None:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(client, messages, options)})


def _ask() -> str | None:
    try:
        return click.prompt("you", prompt_suffix="> ", default="", show_default=False) or None
    except click.Abort:
        click.echo()
        return None


def _answer(client: Client, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Stream one answer and return it, as far as it came."""
    pieces: list[str] = []
    events = client.events(messages=messages, **options)
    try:
        for event in events:
            if isinstance(event, DoneEvent):
                usage, timing = event.usage, event.timing
                click.secho(
                    f"\n[{usage.completion_tokens} tokens, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens"
                    f" cached, first after {timing.ttft_ms:.0f} ms, then {timing.tpot_ms:.0f} ms each]",
                    dim=True,
                )
            else:
                pieces.append(event.text)
                click.echo(event.text, nl=False)
    except KeyboardInterrupt:
        click.echo(" [ended]")
    finally:
        events.close()
    return "".join(pieces)
