"""`pdactors verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdactors.cli.options import config_options, parse_modes

if TYPE_CHECKING:
    from pdactors.bench.verify import Difference, ModeResult, Verification

OWN_OPTIONS = {"cluster.mode": "--modes", "model.dtype": "--dtype"}


@click.command("verify", epilog="Example:  pdactors verify cluster.toml --modes disaggregated --prompts 8")
@config_options
@click.option(
    "--modes", callback=parse_modes, metavar="MODE,...", default="", help="Modes to try.  [default: the file's]"
)
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), default=32, show_default=True, help="How many.")
@click.option("--max-tokens", type=click.IntRange(1, 2**20), default=64, show_default=True, help="Of each answer.")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=8, show_default=True, help="Requests in flight.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and KV, on both sides, whatever FILE says; coarser ones round too much to be equal.",
)
@click.option(
    "--zmq", "address", default="", metavar="ADDRESS", help="Ask the cluster of FILE that runs there instead."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path | None, sets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Start the cluster of FILE in each mode and compare its greedy tokens with those of transformers' generate.

    Exits 1 on any difference but ties: places where the reference's best logits are so near each other that rounding
    decides. It takes minutes. A cluster that runs already must have the --dtype.
    """
    if options["address"] and len(options["modes"]) > 1:
        raise click.UsageError("--zmq: a cluster that runs has one mode")
    from pdactors.bench.verify import verify
    from pdactors.engine.store import progress_bar

    for argument in sets:
        key = argument.partition("=")[0].strip()
        if key in OWN_OPTIONS:
            raise click.UsageError(f"--set {key}: use {OWN_OPTIONS[key]}")
    with progress_bar() as progress:
        found = verify(file, sets=sets, progress=progress, **options)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found))
    else:
        _show(found)
    sys.exit(0 if found.is_good else 1)


def _show(found: Verification) -> None:
    click.echo(
        f"{found.model} in {found.dtype}: {found.prompts} prompts of {found.prompt_tokens} tokens in all, answers of at"
        f" most {found.max_tokens}; the reference took {found.reference_seconds:.0f} s"
    )
    for mode, result in found.modes.items():
        click.echo(f"{mode}: {_summary(result)}")
        for kind, differences in (("tied", result.ties), ("diverged", result.diverged)):
            for difference in differences:
                click.echo(f"  {kind}: {_described(difference)}")


def _summary(result: ModeResult) -> str:
    if result.error is not None:
        return f"failed: {result.error}"
    counts = f"{result.equal} equal, {result.tied} tied, {len(result.diverged)} diverged"
    preempted = f", {result.preempted} preemptions" if result.preempted else ""
    return f"{counts}{preempted}, in {result.seconds:.0f} s"


def _described(difference: Difference) -> str:
    if difference.error is not None:
        return f"prompt {difference.prompt}: {difference.error}"
    wanted, got = ("the end" if token is None else f"{token}" for token in (difference.expected, difference.got))
    margin = "" if difference.margin is None else f" (margin {difference.margin:.2g})"
    return f"prompt {difference.prompt}, position {difference.position}: expected {wanted}, got {got}{margin}"
