"""Files of CURVE keys and tokens, for their owner alone: one secret a file, none of them ever printed.

cluster.key   secret key of the cluster's actors     cluster.pub   its public key, which clients need, too
NAME.key      secret key of a client                 NAME.pub      lets that client in, at the cluster's machines
token         of clients: security.token_file        join_token    of actors: security.join_token_file
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from pdactors.config.cluster import SecuritySection
from pdactors.config.home import keys_dir
from pdactors.errors import ConfigError

CLUSTER = "cluster"
CLIENT = "client"
TOKENS = ("token", "join_token")
_Z85 = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class CurveKeys(Struct, frozen=True):
    """What one process needs for CURVE; every key is 40 characters of Z85."""

    secret: str  # its own
    server: str  # public key of the cluster: of every socket that it connects to
    clients: tuple[str, ...] = ()  # public keys that the client socket lets in

    def __repr__(self) -> str:
        """Leave the secret key out, so that no log or traceback shows it."""
        return f"CurveKeys(server={self.server!r})"


def folder_of(key_dir: str) -> Path:
    """Return the folder that `security.key_dir` names."""
    return Path(key_dir).expanduser().absolute() if key_dir else keys_dir()


def client_key(security: SecuritySection) -> str:
    """Return the file of the key that clients on this machine use; "" where there is none, or it needs none."""
    if not security.curve:
        return ""
    path = folder_of(security.key_dir) / f"{CLIENT}.key"
    return str(path) if path.exists() else ""


def cluster_keys(folder: Path) -> CurveKeys:
    """Read what the cluster's own actors need.

    Raises:
        ConfigError: a file is missing, malformed, or can be read by others; says how to make it.
    """
    clients = sorted(file for file in folder.glob("*.pub") if file.stem != CLUSTER)
    return CurveKeys(
        secret=_read_secret(folder / f"{CLUSTER}.key"),
        server=_read(folder / f"{CLUSTER}.pub"),
        clients=tuple(_read(file) for file in clients),
    )


def client_keys(file: Path) -> CurveKeys:
    """Read what a client needs: its key, `file`, and cluster.pub beside it; raises what `cluster_keys` raises."""
    return CurveKeys(secret=_read_secret(file), server=_read(file.with_name(f"{CLUSTER}.pub")))


def make_keys(folder: Path, pair: Callable[[], tuple[str, str]], clients: tuple[str, ...] = (CLIENT,)) -> list[Path]:
    """Make what is missing in `folder`: tokens, the cluster's key and the clients', each by `pair` (public, secret).

    Nothing that is there is changed. Returns the files that were made.

    Raises:
        ConfigError: a client's name is unusable, half of a pair is there already, or the folder cannot be written to.
    """
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (CLUSTER, *clients):
            if not _NAME.fullmatch(name) or (name == CLUSTER and name in clients) or name in TOKENS:
                raise ConfigError(f'"{name}" cannot be the name of a client: use letters, digits, -, _ and .')
            made += _make_pair(folder / f"{name}.key", folder / f"{name}.pub", pair)
        for file in (folder / name for name in TOKENS):
            if not file.exists():
                _write(file, secrets.token_urlsafe(32))
                made.append(file)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}") from error
    return made


def _make_pair(key: Path, pub: Path, pair: Callable[[], tuple[str, str]]) -> list[Path]:
    there = [file for file in (key, pub) if file.exists()]
    if len(there) == 2:
        return []
    if there:
        missing = pub if there == [key] else key
        raise ConfigError(f"{there[0]} is there without {missing.name}; bring that back, or remove both")
    public, secret = pair()
    _write(key, secret)
    _write(pub, public)
    return [key, pub]


def _write(file: Path, text: str) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{text}\n")


def _read_secret(file: Path) -> str:
    key = _read(file)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{file} can be read by others (mode {mode:04o}); chmod 600 it, or make a new key")
    return key


def _read(file: Path) -> str:
    try:
        with file.open() as opened:
            key = opened.read(100).strip()
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is missing, which security.curve needs: `pdactors keys --dir {file.parent}` makes the keys "
            "once, for all machines of the cluster"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not _Z85.fullmatch(key):
        raise ConfigError(f"{file} does not hold a CURVE key (40 characters of Z85)")
    return key
