"""`pdactors simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pdactors.cli.options import FILE, config_options
from pdactors.cli.traffic import modes_option, put_out, result_options, traffic_of, traffic_options
from pdactors.config.cluster import Mode


@click.command(
    "simulate", epilog="Example:  pdactors simulate cluster.toml --hardware a100-80g --tp 4 --workload mixed --rate 8"
)
@config_options
@modes_option("Modes to simulate.  [default: colocated,chunked,disaggregated]")
@traffic_options
@click.option("--cost", type=FILE, help="Durations as `pdactors calibrate` measured them.")
@click.option(
    "--hardware", default="cpu", show_default=True, help="Or those of a data sheet: a100-80g, h100, h200, cpu."
)
@click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True, help="Devices of each engine.")
@click.option("--decode-tp", type=click.IntRange(1, 64), help="Devices of each decode engine, if not as many.")
@click.option("--hide-caches", is_flag=True, help="Place requests without knowing what engines have cached.")
@result_options
def command(
    file: Path | None,
    sets: tuple[str, ...],
    modes: tuple[Mode, ...],
    cost: Path | None,
    hardware: str,
    tp: int,
    decode_tp: int | None,
    hide_caches: bool,
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Simulate the cluster of FILE in each mode: the real policies, a virtual clock, durations from a cost model.

    Takes the loads of `pdactors bench serve` and prints what it prints. The model is that of FILE, a folder or
    config.json in Hugging Face format, llama-3-8b, llama-3-70b (or 3.1) or smollm2-135m; its weights are not read.
    """
    traffic = traffic_of(options)
    from pdactors.bench.report import check_plots
    from pdactors.engine.store import progress_bar
    from pdactors.sim.simulate import Costs, simulate

    if output is not None:
        check_plots()
    with progress_bar() as progress:
        found = simulate(
            file,
            traffic,
            Costs(cost, hardware, tp, decode_tp or 0),
            sets=sets,
            modes=modes,
            knows_caches=not hide_caches,
            progress=progress,
        )
    put_out(found, as_json=as_json, output=output)
