"""What the supervisor tells an actor's process at birth: over its standard input, so no secret is on a command line."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from pdactors.config.address import Address
from pdactors.config.cluster import ClusterConfig
from pdactors.config.keys import CurveKeys
from pdactors.kv.layout import KVLayout
from pdactors.messages import PROTOCOL_VERSION, Hello, Member, Role
from pdactors.policy.scaling import ENGINES as ENGINES
from pdactors.version import VERSION


class ModelSpec(Struct, frozen=True):
    """The model as every actor must see it."""

    name: str  # as the cluster file calls it
    folder: str
    fingerprint: str
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int


class Descriptors(Struct, frozen=True):
    """Inherited file descriptors; -1 where there is none."""

    arena: int = -1
    control: int = -1  # listening sockets that the supervisor holds, so that a successor keeps the ports
    tcp: int = -1
    zmq: int = -1
    http: int = -1


class ActorSpec(Struct, frozen=True):
    """One actor of one node. `slot` is its place in the arena's books, stable over restarts; `incarnation` is not."""

    run_id: str  # "" of a supervisor that has yet to join
    name: str
    role: Role
    node: str
    rack: str
    slot: int
    incarnation: int
    supervisor_pid: int
    config: ClusterConfig
    model: ModelSpec
    layout: KVLayout
    control: str  # the router's address
    join_token: str
    keys: CurveKeys | None = None  # where security.curve is on
    host: str = "127.0.0.1"  # IP address of the node, where its actors listen
    fds: Descriptors = Descriptors()
    num_engines: int = 1  # on this node, at launch
    threads: int = 1
    cores: tuple[int, ...] = ()  # where an engine's steps run, or all of another actor; any if empty
    io_cores: tuple[int, ...] = ()  # where ZeroMQ's threads run: beside a step they would take turns with it
    ready_file: str = ""  # to be removed if the supervisor dies without doing it

    def __repr__(self) -> str:
        """Leave the secrets out, so that no log or traceback shows them."""
        return f"ActorSpec({self.name!r}, incarnation={self.incarnation})"

    def own_address(self) -> str:
        """Return where this actor listens: any free port of the node's own address."""
        return f"tcp://{Address(self.host, 0)}"

    @property
    def num_owners(self) -> int:
        """Who is sure of a share of the arena: the engines, and the migrator if KV is moved here."""
        return self.num_engines + self.config.moves_kv

    def member(self, pid: int, address: str = "") -> Member:
        """Return how this actor introduces itself."""
        return Member(
            self.name, self.role, self.node, self.rack, pid, self.incarnation, slot=self.slot, address=address
        )

    def hello(self, me: Member) -> Hello:
        """Return what this actor says first on every connection."""
        return Hello(
            protocol=PROTOCOL_VERSION,
            version=VERSION,
            member=me,
            layout=self.layout.fingerprint,
            model=self.model.fingerprint,
            join_token=self.join_token,
            mode=self.config.cluster.mode,
            max_model_len=self.model.max_model_len,
            run_id=self.run_id,
        )


def encode_spec(spec: ActorSpec) -> bytes:
    """Encode for the child's standard input."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> ActorSpec:
    """Decode what the supervisor wrote."""
    return msgspec.msgpack.decode(data, type=ActorSpec)
