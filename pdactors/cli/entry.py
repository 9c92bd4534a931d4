"""The program `pdactors`, up to where the command line takes over: Ctrl-C ends it without a traceback from here on."""

from pdactors.cli.interrupt import ends_at_once


def main() -> None:
    """Import the command line and run it."""
    with ends_at_once():
        from pdactors.cli.main import main as command_line
    command_line()
