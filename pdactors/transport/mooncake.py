"""A client of Mooncake Store: objects from registered memory and back. The only module that imports mooncake.

Every call may take seconds when the master is lost, so they belong in a thread whose caller does not wait for ever. The
store authenticates nobody, and its clients listen on all interfaces: keep them on a network of the cluster's own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdactors.errors import ConfigError, ConnectionLost

PROBE_S = 2.0  # `setup` itself takes a minute and a half to find out that nobody is there
LOCAL_BYTES = 16 << 20  # of the client's own, for objects that do not come from registered memory


class MooncakeClient:
    """One process's connection to the master at `address` ("HOST:PORT")."""

    def __init__(self, address: str, host: str, segment_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Join the store with `segment_bytes` of memory for its objects, and register what objects come from and go to.

        Raises:
            ConfigError: mooncake is not installed, no master answers, or it refuses us.
        """
        _probe(address)
        self._store: Any = _library().MooncakeDistributedStore()
        code = self._store.setup(host, "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", address)
        if code:
            raise ConfigError(f"kv.store = mooncake://{address}: joining it failed with code {code}")
        self._memory = list(memory)  # registered, so it has to stay
        for part in self._memory:
            if code := self._store.register_buffer(part.ctypes.data, part.nbytes):
                raise ConfigError(f"kv.store = mooncake://{address}: its client cannot use the arena, code {code}")

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys have an object.

        Raises:
            ConnectionLost: the master does not answer.
        """
        found = self._store.batch_is_exist(list(keys))
        if any(code < 0 for code in found):
            raise ConnectionLost(f"Mooncake Store: asking for {len(keys)} keys failed with code {min(found)}")
        return next((i for i, code in enumerate(found) if code != 1), len(keys))

    def put(self, keys: Sequence[str], parts: Sequence[NDArray[np.uint8]]) -> list[int]:
        """Store registered memory under keys; return 0 for each that is there now, else Mooncake's code."""
        return list(self._store.batch_put_from(list(keys), *_places(parts)))

    def get(self, keys: Sequence[str], parts: Sequence[NDArray[np.uint8]]) -> list[bool]:
        """Read objects into registered memory; return for each whether it is there, whole."""
        sizes = self._store.batch_get_into(list(keys), *_places(parts))
        return [size == part.nbytes for size, part in zip(sizes, parts, strict=True)]

    def close(self) -> None:
        """Leave the store; objects in our memory are gone."""
        self._store.close()


def check_available(address: str) -> None:
    """Raise ConfigError unless mooncake is installed and something answers at the master's address."""
    _library()
    _probe(address)


def _places(parts: Sequence[NDArray[np.uint8]]) -> tuple[list[int], list[int]]:
    return [part.ctypes.data for part in parts], [part.nbytes for part in parts]


def _library() -> Any:
    os.environ.setdefault("GLOG_minloglevel", "2")
    try:
        from mooncake import store
    except ImportError as error:
        raise ConfigError(
            f"kv.store = mooncake://... needs mooncake: pip install 'pdactors[mooncake]', and the libraries "
            f"libibverbs1, libnuma1 and libcurl4 ({error})"
        ) from error
    return store


def _probe(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except OSError as error:
        raise ConfigError(f"kv.store = mooncake://{address}: no master answers there ({error})") from error
