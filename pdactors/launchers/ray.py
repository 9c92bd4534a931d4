"""The Ray launcher: a `NodeHost` for each node of the file, where Ray finds the resources; it places lost ones anew.

The only module that imports ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pdactors.actors import blueprint
from pdactors.actors.discovery import Ready
from pdactors.actors.launch import told_to_stop
from pdactors.actors.remains import sweep
from pdactors.config.cluster import ClusterConfig
from pdactors.errors import ConfigError, ConnectionLost
from pdactors.launchers.node_host import NodeHost
from pdactors.launchers.placed import Placed
from pdactors.policy import siting

PROBE_S = 2.0
START_S = 60.0  # for Ray's workers to start
PLACE_S = 20.0  # for resources that somebody else may just be giving back


def launch(
    config: ClusterConfig,
    *,
    node: str | None = None,
    ready_file: Path | None = None,
    on_ready: Callable[[Ready], None] = lambda _ready: None,
    lifeline: int | None = None,
) -> None:
    """Run the whole cluster on the machines of the Ray cluster that RAY_ADDRESS, or this machine, knows.

    Raises:
        ConfigError: there is no such cluster, it has no place for a node, or the file asks for what this version or a
            machine does not have.
        PDError: a node could not start, or the cluster cannot go on; says why.
    """
    if node is not None:
        raise ConfigError('cluster.launcher = "ray" places all nodes of the file, so --node is not for it')
    blueprint.check_available(config)
    config = _true_everywhere(config)
    sweep()
    with _connected() as ray:
        asyncio.run(_live(Placed(config, RayHosts(ray, config), ready_file, on_ready), lifeline))


async def _live(placed: Placed, lifeline: int | None) -> None:
    with told_to_stop(placed.stop, lifeline):
        await placed.run()


class RayHosts:
    """Ray's side of it: a placement group with a bundle of resources for each node, and an actor on each bundle."""

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        self._ray = ray
        self._asked = {node.name: siting.needs(config, node) for node in config.node}
        self._actor_class = ray.remote(num_cpus=0, max_restarts=-1)(RayNodeHost)
        self._actors: dict[str, Any] = {}
        self._group: Any = None

    async def place(self) -> None:
        """Take the resources of all nodes, and start the hosts on them.

        Raises:
            ConfigError: some can never be had here, or not all of them now, or Ray does not start a host.
        """
        offered = [machine["Resources"] for machine in self._ray.nodes() if machine["Alive"]]
        if reason := siting.objection(self._asked, offered):
            raise ConfigError(f"Ray cannot place the cluster: {reason}")
        self._group = self._ray.util.placement_group(list(self._asked.values()), strategy="SPREAD")
        try:
            async with asyncio.timeout(PLACE_S):
                await self._group.ready()
        except TimeoutError:
            asked = "; ".join(f'node "{name}" asks for {siting.shown(wanted)}' for name, wanted in self._asked.items())
            names = {name for wanted in self._asked.values() for name in wanted}
            free = siting.shown({k: v for k, v in self._ray.available_resources().items() if k in names})
            raise ConfigError(
                f"Ray did not place the cluster within {PLACE_S:.0f} s: {asked}; free are {free}"
            ) from None
        for name in self._asked:
            self._actors[name] = self._start(name)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(self.call(name, "where") for name in self._asked))
        except (TimeoutError, ConnectionLost) as error:
            reason = str(error) or f"Ray did not start them within {START_S:.0f} s"
            raise ConfigError(f"the hosts of the nodes do not run: {reason}") from error

    async def call(self, node: str, method: str, *arguments: Any) -> Any:
        """Call a method of a node's host; raises ConnectionLost while Ray has none."""
        try:
            return await getattr(self._actors[node], method).remote(*arguments)
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.ActorDiedError):  # which Ray does not start again
                self._actors[node] = self._start(node)
            lines = str(error).strip().splitlines()
            raise ConnectionLost(f"its host is lost: {' ... '.join(dict.fromkeys([lines[0], lines[-1]]))}") from error

    def close(self) -> None:
        """End the hosts, and what is left of their nodes with them; give the resources back."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    def _start(self, name: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = PlacementGroupSchedulingStrategy(self._group, list(self._asked).index(name))
        return self._actor_class.options(scheduling_strategy=bundle).remote(os.environ.get("PDACTORS_HOME", ""))


class RayNodeHost(NodeHost):
    """A `NodeHost` that asks Ray where it is."""

    async def where(self) -> str:
        """Return this machine's address, as Ray's nodes know it."""
        import ray

        return str(ray.util.get_node_ip_address())


@contextmanager
def _connected() -> Iterator[Any]:
    """Be a driver of the Ray cluster that runs already.

    Raises:
        ConfigError: ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"cluster.launcher = \"ray\" needs ray: pip install 'pdactors[ray]' ({error})") from error
    _probe(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f'cluster.launcher = "ray": no Ray cluster is known here; `ray start --head` begins one, RAY_ADDRESS names '
            f"another ({error})"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Refuse an address of a Ray cluster where nobody answers, which Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if address in ("", "auto"):
        return
    if "://" in address or not (colon and port.isdecimal()):
        raise ConfigError(
            f'RAY_ADDRESS = "{address}" must be HOST:PORT of the cluster itself, not of a Ray client server'
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except OSError as error:
        raise ConfigError(f'RAY_ADDRESS = "{address}": no Ray cluster answers there ({error})') from error


def _true_everywhere(config: ClusterConfig) -> ClusterConfig:
    """Return the file as any machine can read it: with secrets instead of their files, addresses, and whole paths.

    Actors that have no secret of their own get one.

    Raises:
        ConfigError: a file cannot be read, or a node's host is not known.
    """
    replace = msgspec.structs.replace
    security = replace(
        config.security,
        token=config.security.client_token(),
        token_file="",
        join_token=config.security.actor_token() or secrets.token_hex(16),
        join_token_file="",
    )
    model = Path(config.model.path).expanduser()
    path = str(model.absolute()) if model.exists() else config.model.path
    return replace(
        config,
        security=security,
        model=replace(config.model, path=path),
        node=tuple(replace(node, host=_ip_of(node.host)) for node in config.node),
    )


def _ip_of(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f'node.host = "{host}" is not known here: {error}') from error
