"""Compiles the kernels in a process of its own, and says so: `python -m pdactors.engine.compiling DTYPE`."""

from __future__ import annotations

import sys
import time

from pdactors.config.logging import configure, get_logger
from pdactors.engine.store import progress_bar
from pdactors.kernels import warm


def main() -> None:
    """Compile for the dtype that is named, unless another process just has."""
    configure()
    log = get_logger(dtype=sys.argv[1])
    log.info("compiling kernels", once_for="this version and CPU", meanwhile="transformers serves")
    began = time.monotonic()
    with progress_bar() as progress:
        progress("compile kernels", 0, 0)
        warm.main()
    log.info("kernels compiled", seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
