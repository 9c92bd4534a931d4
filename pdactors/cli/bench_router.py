"""`pdactors bench router`."""

from __future__ import annotations

import click


@click.command("router", epilog="Example:  pdactors bench router --json")
@click.option("--model", default="smollm2-135m", show_default=True, help="Whose tokenizer the gateway uses.")
@click.option("--requests", type=click.IntRange(100), default=4000, show_default=True, help="Of each size of fleet.")
@click.option("--streams", type=click.IntRange(1, 4096), default=200, show_default=True, help="At the gateway.")
@click.option("--tokens", type=click.IntRange(2, 100_000), default=500, show_default=True, help="Of each stream.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def router(model: str, requests: int, streams: int, tokens: int, as_json: bool) -> None:
    """Time what the router decides for fleets of 10, 100 and 1,000 workers, and what one gateway hands out.

    The fleets are simulated, the decisions and their times are real. The gateway is a process of its own; its tokens
    come over ZeroMQ and leave over a TCP connection for each stream.
    """
    import msgspec

    from pdactors.bench.fanout import measure_fanout
    from pdactors.engine.store import progress_bar
    from pdactors.sim.decisions import measure_all

    with progress_bar() as progress:
        fanout = measure_fanout(model, streams=streams, tokens=tokens, progress=progress)
        decisions = measure_all(requests, progress)
    if as_json:
        found = {"decisions": decisions, "fanout_tokens_s": fanout.tokens_s, "fanout": fanout}
        click.echo(msgspec.json.encode(found))
        return
    for one in decisions:
        click.echo(f"{one.workers:5d} workers: a decision takes {one.p50_us:.0f} us, P99 {one.p99_us:.0f} us")
    click.echo(
        f"one gateway, {fanout.streams} streams: {fanout.tokens_s:,.0f} tokens/s, {fanout.cpu_us:g} us of its CPU each"
    )
