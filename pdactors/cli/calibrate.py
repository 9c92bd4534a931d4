"""`pdactors calibrate`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from pdactors.cli.options import config_options


@click.command("calibrate", epilog="Example:  pdactors calibrate -o cost.json && pdactors simulate --cost cost.json")
@config_options
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Of each measurement.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the cost model here.  [default: print]",
)
def command(file: Path | None, sets: tuple[str, ...], rounds: int, output: Path | None) -> None:
    """Measure what steps, messages and transfers of FILE's engines cost on this machine, for `pdactors simulate`.

    Takes some minutes, starts two small clusters, and wants the machine for itself.
    """
    from pdactors.engine.store import progress_bar
    from pdactors.sim.calibrate import calibrate

    with progress_bar() as progress:
        cost = calibrate(file, sets=sets, rounds=rounds, progress=progress)
    text = msgspec.json.format(msgspec.json.encode(cost), indent=1)
    if output is None:
        click.echo(text)
    else:
        output.write_bytes(text + b"\n")
        crowd = cost.crowd
        click.echo(
            f"step {cost.step_s * 1000:.2f} ms besides, {cost.sequence_s * 1e6:.0f} us a sequence; message "
            f"{cost.control_s * 1e6:.0f} us; request {cost.request_s * 1000:.2f} ms; beside another engine: decode "
            f"{1 + crowd.decode_by_decode:.2f} (that decodes) or {1 + crowd.decode_by_prompt:.2f} (with a prompt), "
            f"prompts {1 + crowd.prompt_by_decode:.2f} or {1 + crowd.prompt_by_prompt:.2f} times as long"
        )
