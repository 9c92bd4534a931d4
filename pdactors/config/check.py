"""Whether the values of a cluster file fit together. Types and ranges of single keys are the schema's."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from pdactors.config.address import Address, is_loopback, parse_address
from pdactors.config.cluster import PRINTABLE, ClusterConfig, NodeSection, is_token
from pdactors.config.memory import format_size
from pdactors.errors import ConfigError

MIN_MEMORY_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_RACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True)
class Problem:
    """What is wrong, and the keys whose setting can be at fault, the likeliest first."""

    keys: tuple[str, ...]
    text: str


def validate(cfg: ClusterConfig) -> None:
    """Raise ConfigError that lists, one a line, everything that does not fit together."""
    if found := problems(cfg):
        raise ConfigError("\n".join(problem.text for problem in found))


def problems(cfg: ClusterConfig) -> list[Problem]:
    """Find everything that does not fit together."""
    return [
        *_sizes(cfg),
        *_store(cfg),
        *_addresses(cfg),
        *_exposure(cfg),
        *_security(cfg),
        *_nodes(cfg),
        *_reach(cfg),
    ]


def _problem(key: str, value: object, text: str, *others: str) -> Problem:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return Problem((key, *others), f"{key} = {shown}: {text}")


def _sizes(cfg: ClusterConfig) -> Iterator[Problem]:
    block_tokens, max_len = cfg.kv.block_tokens, cfg.model.max_model_len
    if block_tokens & (block_tokens - 1):
        yield _problem("kv.block_tokens", block_tokens, "must be a power of two, 8 to 256")
    if max_len < block_tokens:
        limit = f"must be at least kv.block_tokens = {block_tokens}"
        yield _problem("model.max_model_len", max_len, limit, "kv.block_tokens")
    if cfg.cluster.mode == "chunked" and cfg.engine.chunk_tokens <= cfg.engine.max_batch:
        limit = (
            f"must be more than engine.max_batch = {cfg.engine.max_batch}, or a full batch leaves no room for prompts"
        )
        yield _problem("engine.chunk_tokens", cfg.engine.chunk_tokens, limit, "engine.max_batch")
    heartbeat_ms, dead_after_ms = cfg.router.heartbeat_ms, cfg.router.dead_after_ms
    if dead_after_ms <= heartbeat_ms:
        limit = f"must be more than router.heartbeat_ms = {heartbeat_ms}"
        yield _problem("router.dead_after_ms", dead_after_ms, limit, "router.heartbeat_ms")
    try:
        if cfg.kv.memory_bytes < MIN_MEMORY_BYTES:
            yield _problem("kv.memory", cfg.kv.memory, f"must be at least {format_size(MIN_MEMORY_BYTES)}")
    except ConfigError as error:
        yield Problem(("kv.memory",), str(error))
    try:
        if cfg.kv.store_bytes < MIN_MEMORY_BYTES:
            least = f"must be at least {format_size(MIN_MEMORY_BYTES)}"
            yield _problem("kv.store_memory", cfg.kv.store_memory, least)
    except ConfigError as error:
        yield Problem(("kv.store_memory",), str(error))


def _store(cfg: ClusterConfig) -> Iterator[Problem]:
    scheme, found, address = cfg.kv.store.partition("mooncake://")
    if cfg.kv.store == "arena":
        return
    try:
        if scheme or not found or "://" in address:
            raise ConfigError("no such store")
        parse_address(address)
    except ConfigError:
        yield _problem("kv.store", cfg.kv.store, 'must be "arena" or mooncake://HOST:PORT')


def _sockets(cfg: ClusterConfig) -> dict[str, str]:
    """Every address that is bound, by its key; those that are switched off are left out."""
    listen = {
        "listen.tcp": cfg.listen.tcp,
        "listen.zmq": cfg.listen.zmq,
        "listen.http": cfg.listen.http,
    }
    return {key: text for key, text in listen.items() if text} | {"router.control": cfg.router.control}


def _parsed(cfg: ClusterConfig) -> dict[str, Address]:
    parsed = {}
    for key, text in _sockets(cfg).items():
        try:
            parsed[key] = parse_address(text)
        except ConfigError:
            continue  # _addresses reports it
    return parsed


def _addresses(cfg: ClusterConfig) -> Iterator[Problem]:
    for key, text in _sockets(cfg).items():
        try:
            parse_address(text)
        except ConfigError as error:
            yield Problem((key,), f"{key}: {error}")
    for (key, address), (other, taken) in combinations(_parsed(cfg).items(), 2):
        if address.collides(taken):
            yield _problem(
                other, _sockets(cfg)[other], f"the same port as {key}; take another, or 0 for a free one", key
            )


def _exposure(cfg: ClusterConfig) -> Iterator[Problem]:
    """Whatever other machines can reach asks for a secret, or for a known key."""
    security = cfg.security
    actors = security.knows_actors, "security.join_token, security.join_token_file or security.curve"
    guards = {
        "listen.tcp": (security.needs_token, "security.token or security.token_file"),
        "listen.http": (security.needs_token, "security.token or security.token_file"),
        "listen.zmq": (security.needs_token or security.curve, "security.token, security.token_file or security.curve"),
        "router.control": actors,
    }
    if cfg.cluster.launcher == "ray":  # it gives the actors a secret of their own
        actors = guards["router.control"] = True, ""
    for key, address in _parsed(cfg).items():
        is_guarded, needed = guards[key]
        if not (address.is_loopback or is_guarded):
            yield _problem(key, _sockets(cfg)[key], _exposed(needed))
    for index, node in enumerate(cfg.node):
        is_guarded, needed = actors
        if not (is_loopback(node.host) or is_guarded):
            yield _problem(f"node.{index}.host", node.host, _exposed(needed))


def _exposed(needed: str) -> str:
    return f"not on loopback (127.0.0.0/8, ::1), so {needed} must be set (`pdactors keys` makes them)"


def _security(cfg: ClusterConfig) -> Iterator[Problem]:
    for name in ("token", "join_token"):
        value, file = getattr(cfg.security, name), getattr(cfg.security, f"{name}_file")
        if value and file:
            both = f"only one of security.{name} and security.{name}_file may be set"
            yield _problem(f"security.{name}_file", file, both, f"security.{name}")
        if value == "***":
            hidden = 'stands for a secret that "config show" left out; write the secret, or ""'
            yield _problem(f"security.{name}", value, hidden)
        elif value and not is_token(value):
            yield _problem(f"security.{name}", "***", f"must be one {PRINTABLE}")


def _nodes(cfg: ClusterConfig) -> Iterator[Problem]:
    names = [node.name for node in cfg.node]
    for index, node in enumerate(cfg.node):
        key = f"node.{index}"
        if names.index(node.name) < index:
            first = f"node.{names.index(node.name)}.name"
            yield _problem(f"{key}.name", node.name, f"the same name as {first}; names must differ", first)
        yield from _words(key, node)
        if not node.engines(cfg.cluster.mode):
            counts = "prefill and decode" if cfg.is_separated else "workers, prefill and decode"
            keys = (f"{key}.prefill", f"{key}.decode", f"{key}.workers")
            yield Problem(keys, f'{key} ("{node.name}"): {counts} are 0; a node runs at least one actor')
    if cfg.router.node not in names:
        yield _problem(
            "router.node", cfg.router.node, f"no node has this name; known: {', '.join(names)}", "node.0.name"
        )
    if cfg.is_separated and len({role for node in cfg.node for role in node.engines(cfg.cluster.mode)}) == 1:
        missing = "prefill" if any(node.decode for node in cfg.node) else "decode"
        absent = tuple(f"node.{index}.{missing}" for index in range(len(cfg.node)))
        yield Problem(
            absent, f"{absent[0]} = 0: {cfg.cluster.mode} mode needs at least one {missing} actor in the cluster"
        )


def _words(key: str, node: NodeSection) -> Iterator[Problem]:
    if not _NAME.fullmatch(node.name):
        yield _problem(f"{key}.name", node.name, "must be letters, digits, - and _, a letter first, at most 64")
    if not _RACK.fullmatch(node.rack):
        yield _problem(f"{key}.rack", node.rack, "must be letters, digits, -, _ and ., at most 64")
    if not _is_host(node.host):
        yield _problem(f"{key}.host", node.host, "must be the name or the IP address of one machine")
    if not _DEVICE.fullmatch(node.device):
        yield _problem(f"{key}.device", node.device, "must be cpu, cuda or cuda:N")
    try:
        _ = node.ucx_port_range
    except ConfigError as error:
        yield Problem((f"{key}.ucx_ports",), f"{key}.ucx_ports: {error}")


def _is_host(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return _HOST.fullmatch(text) is not None and not text.replace(".", "").isdigit()


def _reach(cfg: ClusterConfig) -> Iterator[Problem]:
    """Nodes on other machines find the router only at an address that leads there."""
    control = _parsed(cfg).get("router.control")
    homes = [node.host for node in cfg.node if node.name == cfg.router.node]
    if control is None or not homes or cfg.cluster.launcher == "ray":  # which finds out by itself where it is
        return
    for index, node in enumerate(cfg.node):
        if is_loopback(node.host) or node.host == homes[0]:
            continue
        if is_loopback(homes[0]):
            key = f"node.{[node.name for node in cfg.node].index(cfg.router.node)}.host"
            needed = (
                f"node.{index}.host = {node.host} is another machine, from which the gateway cannot be reached there"
            )
            yield _problem(key, homes[0], needed, f"node.{index}.host")
        if control.is_loopback or control.port == 0:
            needed = (
                f"node.{index}.host = {node.host} is another machine, so a fixed port on a reachable address is needed"
            )
            yield _problem("router.control", cfg.router.control, needed, f"node.{index}.host")
            return
