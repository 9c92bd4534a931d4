"""What Ctrl-C does while modules are imported."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STATUS = 130  # what shells report for a program that Ctrl-C ended


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C kill the process meanwhile: an import that is broken off anywhere prints what no user can read.

    Leaves SIGINT alone where somebody else ignores or handles it. In the main thread only.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
