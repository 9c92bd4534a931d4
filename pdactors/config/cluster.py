"""The schema of cluster.toml: every section and key with its type, range, default and one line that explains it.

What single values cannot show (that they fit together) is held by `check.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pdactors.config.memory import MAX_SIZE_BYTES, parse_size
from pdactors.errors import ConfigError

Mode = Literal["colocated", "chunked", "disaggregated", "kvstore"]
EngineRole = Literal["prefill", "decode", "worker"]
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 8, 256


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the cluster file."""


class ClusterSection(Section, frozen=True):
    """What kind of cluster it is."""

    mode: Annotated[Mode, Meta(description="which actors run, and where KV goes")] = "disaggregated"
    launcher: Annotated[
        Literal["local", "ray"],
        Meta(
            description="who places nodes: local, on each machine its own `pdactors launch`; ray, Ray for all of them"
        ),
    ] = "local"
    drain_s: Annotated[
        float,
        Meta(ge=0.0, le=3600.0, description="how long running requests may go on after SIGTERM or Ctrl-C"),
    ] = 0.5


class ModelSection(Section, frozen=True):
    """The one model that the cluster serves."""

    path: Annotated[
        str, Meta(min_length=1, description="a bundled name, a Hugging Face folder, a .gguf file, or a Hub id")
    ] = "smollm2-135m"
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        Meta(description="of weights and KV; float32 for exact comparison"),
    ] = "bfloat16"
    max_model_len: Annotated[
        int, Meta(ge=1, le=2**24, description="most tokens of a sequence, prompt and answer together")
    ] = 4096


class ListenSection(Section, frozen=True):
    """Client sockets; "" switches one off, port 0 picks a free one."""

    tcp: Annotated[str, Meta(description='line protocol; "" switches it off, port 0 picks a free one')] = (
        "127.0.0.1:7070"
    )
    zmq: Annotated[str, Meta(description='client library; "" switches it off, port 0 picks a free one')] = (
        "tcp://127.0.0.1:7071"
    )
    http: Annotated[
        str, Meta(description='OpenAI API, /metrics, /health; "" switches it off, port 0 picks a free one')
    ] = "127.0.0.1:7080"


class EngineSection(Section, frozen=True):
    """How engines batch; the same for all of them."""

    max_batch: Annotated[int, Meta(ge=1, le=4096, description="sequences per decode step")] = 32
    chunk_tokens: Annotated[
        int, Meta(ge=1, le=2**20, description="prefill chunk; also the token budget of a mixed step")
    ] = 512
    batch_wait_ms: Annotated[
        float, Meta(ge=0.0, le=10_000.0, description="how long an idle decode actor waits to fill a batch")
    ] = 0.0
    slow_step_ms: Annotated[
        float, Meta(gt=0.0, le=600_000.0, description="a slower decode step is logged, at most once a second")
    ] = 100.0
    stamp_tokens: Annotated[
        bool, Meta(description="token events say when the engine sampled them (CLOCK_MONOTONIC), for debugging")
    ] = False


class KVSection(Section, frozen=True):
    """The KV cache, how it is laid out, lent and moved."""

    block_tokens: Annotated[
        int,
        Meta(ge=MIN_BLOCK_TOKENS, le=MAX_BLOCK_TOKENS, description="tokens per block; a power of two"),
    ] = 32
    memory: Annotated[
        str | Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)],
        Meta(description='per node and device: "2GiB", "512MiB", "1.5GB", or a number of bytes'),
    ] = "2GiB"
    transport: Annotated[
        Literal["auto", "lease", "cuda_ipc", "ucx"],
        Meta(description="how KV moves; a named one is the only one, and an error at start where it cannot be had"),
    ] = "auto"
    compression: Annotated[
        Literal["none", "int8", "int4", "auto"],
        Meta(description="on the wire between nodes; auto decides by measured bandwidth"),
    ] = "none"
    prune: Annotated[
        float, Meta(gt=0.0, le=1.0, description="share of prompt tokens whose KV is kept when it moves; 1.0 keeps all")
    ] = 1.0
    lease_s: Annotated[float, Meta(ge=0.1, le=86_400.0, description="how long a lease lasts unless renewed")] = 30.0
    checksum: Annotated[bool, Meta(description="verify every block that moves between nodes")] = True
    overlap: Annotated[
        bool, Meta(description="send the KV of finished prompt chunks while later ones are computed")
    ] = True
    damage_every: Annotated[
        int,
        Meta(ge=0, le=2**31, description="debugging: spoil a byte of every n-th transfer, to see it caught; 0: none"),
    ] = 0
    store: Annotated[str, Meta(description="of kvstore mode: arena, or mooncake://HOST:PORT")] = "arena"
    store_memory: Annotated[str | int, Meta(description="that each node adds to a Mooncake Store, besides memory")] = (
        "1GiB"
    )

    @property
    def memory_bytes(self) -> int:
        """`memory` as a number; raises ConfigError that names the key."""
        return _size("kv.memory", self.memory)

    @property
    def store_bytes(self) -> int:
        """`store_memory` as a number; raises ConfigError that names the key."""
        return _size("kv.store_memory", self.store_memory)


def _size(key: str, text: str | int) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


class RouterSection(Section, frozen=True):
    """Where requests go, how many may wait, and when an actor counts as lost."""

    node: Annotated[str, Meta(description="the node that runs router and gateway")] = "n0"
    control: Annotated[
        str, Meta(description="where actors join; a fixed port when other machines do (of Ray only the port counts)")
    ] = "tcp://127.0.0.1:0"
    policy: Annotated[
        Literal["locality", "least_loaded", "round_robin"], Meta(description="how a request's actors are chosen")
    ] = "locality"
    max_distance: Annotated[
        int, Meta(ge=0, le=3, description="how far KV may move: 0 same device, 1 same node, 2 same rack, 3 anywhere")
    ] = 2
    local_prefill_tokens: Annotated[
        int,
        Meta(ge=0, le=2**24, description="prompts with at most this many uncached tokens are prefilled on decode"),
    ] = 0
    max_queue: Annotated[int, Meta(ge=1, le=2**20, description="requests that may wait; more are refused")] = 1024
    request_timeout_s: Annotated[
        float, Meta(gt=0.0, le=604_800.0, description="a request that takes longer is ended")
    ] = 600.0
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000, description="how often an actor says that it lives")] = 500
    dead_after_ms: Annotated[
        int, Meta(ge=20, le=600_000, description="a silence that is taken for death; more than heartbeat_ms")
    ] = 2000
    record: Annotated[
        str,
        Meta(description='debugging: file for all that the router is told and orders, prompts too; "" writes none'),
    ] = ""


class TraceSection(Section, frozen=True):
    """What actors remember for timelines."""

    requests: Annotated[
        int, Meta(ge=0, le=2**20, description="every actor can tell what it did for so many of the last; 0: for none")
    ] = 256
    steps: Annotated[int, Meta(ge=1, le=2**24, description="decode steps that an engine remembers for that")] = 16_384


class SecuritySection(Section, frozen=True):
    """Who gets in. Secrets are better kept in files, which `pdactors keys` makes."""

    token: Annotated[str, Meta(description="bearer token of clients (TCP, HTTP, ZeroMQ)")] = ""
    token_file: Annotated[str, Meta(description="a file that holds the token, instead of token")] = ""
    join_token: Annotated[
        str, Meta(description="shared secret of the actors; this or curve is needed once a node is not on loopback")
    ] = ""
    join_token_file: Annotated[str, Meta(description="a file that holds it, instead of join_token")] = ""
    curve: Annotated[
        bool, Meta(description="CURVE on every ZeroMQ socket: encrypted, and for known keys only (`pdactors keys`)")
    ] = False
    key_dir: Annotated[str, Meta(description='folder of the CURVE keys; "" is keys in $PDACTORS_HOME')] = ""

    def __repr__(self) -> str:
        """Leave the secrets out, so that no log or traceback shows them."""
        return f"SecuritySection({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return list(self._shown().items())

    def _shown(self) -> dict[str, str | bool]:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: "***" if name in SECRETS and value else value for name, value in values.items()}

    @property
    def needs_token(self) -> bool:
        """Say whether clients must show a token."""
        return bool(self.token or self.token_file)

    @property
    def knows_actors(self) -> bool:
        """Say whether the actors that join prove that they belong to the cluster."""
        return bool(self.join_token or self.join_token_file or self.curve)

    def client_token(self) -> str:
        """The token, read from `token_file` if that is set; "" for none. Raises ConfigError that names the file."""
        return _read_token("security.token_file", self.token_file) if self.token_file else self.token

    def actor_token(self) -> str:
        """The join token, read from `join_token_file` if that is set; "" for none. Raises ConfigError."""
        return (
            _read_token("security.join_token_file", self.join_token_file) if self.join_token_file else self.join_token
        )


SECRETS = frozenset({"token", "join_token"})  # keys of [security] whose values are never shown
MAX_TOKEN_FILE = 4096  # characters
PRINTABLE = "word of printable ASCII characters"  # so that it fits an HTTP header


def is_token(text: str) -> bool:
    """Say whether `text` can be a client's token."""
    return bool(text) and all("!" <= char <= "~" for char in text)


def _read_token(key: str, file: str) -> str:
    try:
        with Path(file).expanduser().open() as opened:
            token = opened.read(MAX_TOKEN_FILE).strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f'{key} = "{file}" cannot be read: {error}') from error
    if not is_token(token):
        raise ConfigError(f'{key} = "{file}" must hold one {PRINTABLE}')
    return token


class NodeSection(Section, frozen=True):
    """One machine's part, or a part of one: each node has a KV arena of its own. Repeat the table for each."""

    name: Annotated[str, Meta(description="unique; letters, digits, - and _, a letter first")] = "n0"
    host: Annotated[
        str,
        Meta(description="address of the machine; two nodes may share one. With Ray loopback stands for any machine"),
    ] = "127.0.0.1"
    rack: Annotated[str, Meta(description="nodes of one rack are near each other")] = "r0"
    prefill: Annotated[int, Meta(ge=0, le=256, description="prefill actors (disaggregated and kvstore mode)")] = 1
    decode: Annotated[int, Meta(ge=0, le=256, description="decode actors (disaggregated and kvstore mode)")] = 1
    workers: Annotated[
        int, Meta(ge=0, le=256, description="workers (colocated and chunked mode); 0 is prefill + decode of them")
    ] = 0
    device: Annotated[str, Meta(description="cpu, cuda or cuda:N")] = "cpu"
    threads: Annotated[int, Meta(ge=0, le=1024, description="per compute actor; 0 shares the cores out evenly")] = 1
    ucx_device: Annotated[str, Meta(description='network device for UCX; "" finds the one that holds host')] = ""
    ucx_ports: Annotated[str, Meta(description="FIRST-LAST, the ports that UCX may listen on")] = "30000-30010"

    @property
    def num_workers(self) -> int:
        """How many workers colocated and chunked mode run here."""
        return self.workers or self.prefill + self.decode

    def engines(self, mode: Mode) -> dict[EngineRole, int]:
        """How many engines of each role run here; roles that have none are left out."""
        if mode in ("colocated", "chunked"):
            return {"worker": self.num_workers} if self.num_workers else {}
        counts: dict[EngineRole, int] = {"prefill": self.prefill, "decode": self.decode}
        return {role: count for role, count in counts.items() if count}

    @property
    def ucx_port_range(self) -> range:
        """The ports of `ucx_ports`; raises ConfigError that quotes them."""
        first, dash, last = self.ucx_ports.partition("-")
        if not (dash and _is_port(first) and _is_port(last) and int(first) <= int(last)):
            raise ConfigError(f'"{self.ucx_ports}" is not a range of ports: write FIRST-LAST, within 1 to 65535')
        return range(int(first), int(last) + 1)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535


class ClusterConfig(Section, frozen=True):
    """A whole cluster file. The default is one node on loopback with one prefill and one decode actor."""

    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    listen: ListenSection = ListenSection()
    engine: EngineSection = EngineSection()
    kv: KVSection = KVSection()
    router: RouterSection = RouterSection()
    trace: TraceSection = TraceSection()
    security: SecuritySection = SecuritySection()
    node: Annotated[tuple[NodeSection, ...], Meta(min_length=1)] = (NodeSection(),)

    @property
    def is_separated(self) -> bool:
        """Say whether prefill and decode are different actors."""
        return self.cluster.mode in ("disaggregated", "kvstore")

    @property
    def moves_kv(self) -> bool:
        """Say whether KV may have to move from prefill to decode: there are several nodes, or the file says so."""
        way = self.kv.transport
        return self.is_separated and way != "lease" and (way != "auto" or len(self.node) > 1)

    @property
    def prunes(self) -> bool:
        """Say whether prompts leave tokens out when their KV moves."""
        return self.moves_kv and self.kv.prune < 1

    @property
    def has_store(self) -> bool:
        """Say whether engines publish KV to a store, which each node's migrator keeps."""
        return self.cluster.mode == "kvstore"

    @property
    def mooncake(self) -> str:
        """Return the address of the Mooncake Store behind the nodes' own stores, "" without one."""
        return self.kv.store.removeprefix("mooncake://") if self.has_store and self.kv.store != "arena" else ""

    @property
    def migrators_own(self) -> bool:
        """Say whether a node's migrator has KV blocks of its own."""
        return self.moves_kv or self.has_store

    @property
    def data_transport(self) -> str:
        """Name the transport that moves KV between migrators."""
        return self.kv.transport if self.kv.transport not in ("auto", "lease") else "ucx"

    def node_named(self, name: str) -> NodeSection:
        """Find a node; raises ConfigError that lists the known ones."""
        for node in self.node:
            if node.name == name:
                return node
        raise ConfigError(f'no node is named "{name}"; known: {", ".join(node.name for node in self.node)}')
