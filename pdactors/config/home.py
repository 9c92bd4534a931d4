"""The one folder outside the checkout that pdactors writes to."""

from __future__ import annotations

import os
from pathlib import Path

from pdactors.errors import ConfigError


def home() -> Path:
    """$PDACTORS_HOME, or ~/.cache/pdactors; made on first use, for its user alone. Raises ConfigError."""
    return _made(Path(os.environ.get("PDACTORS_HOME") or "~/.cache/pdactors"))


def models_dir() -> Path:
    """Where fetched and converted models are kept."""
    return _made(home() / "models")


def logs_dir() -> Path:
    """Where actors that run in the background write their logs."""
    return _made(home() / "logs")


def keys_dir() -> Path:
    """Where `pdactors keys` puts keys and tokens."""
    return _made(home() / "keys")


def _made(path: Path) -> Path:
    try:
        path = path.expanduser().absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory to expand
        raise ConfigError(f"{path} cannot be used ({error}); set PDACTORS_HOME to a folder you can write to") from error
    return path
