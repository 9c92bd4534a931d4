"""What end-to-end tests need: a tiny model, clusters that are checked for leaks, and a line protocol client."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, settings
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from pdactors import Client, Cluster, launch
from pdactors.actors.discovery import running
from pdactors.config.home import home as default_home
from pdactors.errors import PDError
from pdactors.kernels import warm

# A shared machine can be slow at any moment; that fails no test.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


CORPUS = ["the cat sat on the mat", "what is the capital of France?", "naïve café über", "日本語のテキスト 😀😃"] * 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
MAX_POSITION = 8192
TOKEN_LOOP = ("^", "\n", ".")  # after "^" the tiny model writes "\n.\n.\n." and so on
EOS_TRIGGER = "~"  # after it the end
BASE = {
    "model.dtype": "float32",
    "model.max_model_len": 2048,
    "kv.memory": "8MiB",
    "listen.tcp": "127.0.0.1:0",
    "listen.zmq": "tcp://127.0.0.1:0",
    "listen.http": "127.0.0.1:0",
}
KEPT = {"models", "logs", "downloads", "kernels"}  # what may stay in $PDACTORS_HOME
KERNELS = default_home() / "kernels"  # compiled once for all tests


# ---- Models --------


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over a byte-level vocabulary, but for a few tokens whose successor is certain."""
    warm.compile_all("float32")
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    backend = _tokenizer()
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    _network(backend).save_pretrained(folder)
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _network(backend: tokenizers.Tokenizer) -> LlamaForCausalLM:
    def index(text: str) -> int:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert len(ids) == 1, f"{text!r} is not one token"
        return int(ids[0])

    eos = backend.token_to_id("<|im_end|>")
    torch.manual_seed(11)
    network = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,  # heads of 32, so that our kernels compute it
            vocab_size=backend.get_vocab_size(),
            max_position_embeddings=MAX_POSITION,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=eos,
            tie_word_embeddings=False,
        )
    )
    certain = dict(zip(TOKEN_LOOP, [*TOKEN_LOOP[1:], TOKEN_LOOP[1]], strict=True)) | {EOS_TRIGGER: None}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
        embedding, head = network.model.embed_tokens.weight, network.lm_head.weight
        head[eos] = 0.0  # never by chance
        for text in certain:  # the sure ones have embeddings that shine through both layers
            embedding[index(text)] = torch.randn(64) * 4
        for text, successor in certain.items():
            direction = embedding[index(text)] / embedding[index(text)].norm()
            head[eos if successor is None else index(successor)] += 1.5 * direction
    return network


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct, fetched if it is not cached."""
    from pdactors.engine import store

    warm.compile_all("bfloat16")
    try:
        return store.resolve("smollm2-135m", fetch=True)
    except PDError as error:
        pytest.skip(f"smollm2-135m is not cached and cannot be fetched: {error}")


# ---- Clusters --------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A $PDACTORS_HOME with nothing but the kernels, for this process and those that it starts."""
    folder = tmp_path / "home"
    share_kernels(folder)
    monkeypatch.setenv("PDACTORS_HOME", str(folder))
    return folder


@contextmanager
def launched(home: Path, sets: list[str]) -> Iterator[Cluster]:
    """Run a cluster under `home`; at the end nothing of it may be left."""
    segments = set(os.listdir("/dev/shm"))
    with at_home(home):
        cluster = launch(sets=sets, quiet=False)  # so that a failed test shows the log
    with cluster:
        yield cluster
    assert_gone(cluster)
    assert set(os.listdir("/dev/shm")) <= segments
    assert_clean(home)


def share_kernels(home: Path) -> None:
    """Have what was compiled found under this home, too."""
    KERNELS.mkdir(exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "kernels").exists():
        (home / "kernels").symlink_to(KERNELS)


@contextmanager
def at_home(home: Path) -> Iterator[None]:
    share_kernels(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDACTORS_HOME", str(home))
        yield


def assert_gone(cluster: Cluster, timeout_s: float = 1.0) -> None:
    """Hold that a cluster has neither processes nor listening sockets, at the latest after `timeout_s`."""
    run_id = cluster.ready.run_id
    eventually(lambda: not processes_of(run_id), timeout_s, lambda: f"left: {processes_of(run_id)}")
    assert not [address for address in (cluster.tcp, cluster.zmq, cluster.http) if address and _answers(address)]
    assert not psutil.pid_exists(cluster.ready.pid) or cluster.process.poll() is not None


def assert_clean(home: Path) -> None:
    """Hold that no cluster is announced under `home` and that nothing lies there but models, logs and downloads."""
    with at_home(home):
        assert not running()
    assert set(os.listdir(home)) <= KEPT


class Start(Protocol):
    """Starts a cluster on the tiny model: `start(**{"kv.memory": "1MiB"})`."""

    def __call__(self, **keys: object) -> AbstractContextManager[Cluster]: ...


@pytest.fixture(scope="session")
def start(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    def starter(**keys: object) -> AbstractContextManager[Cluster]:
        return launched(tmp_path_factory.mktemp("home"), settings(tiny_model, **keys))

    return starter


@pytest.fixture
def tiny_settings(tiny_model: Path) -> Callable[..., list[str]]:
    """Return the arguments of `pdactors launch` for a small cluster on the tiny model."""
    return lambda **keys: [part for value in settings(tiny_model, **keys) for part in ("--set", value)]


@pytest.fixture(scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def session_cluster(session_home: Path, tiny_model: Path) -> Iterator[Cluster]:
    with launched(session_home, settings(tiny_model)) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """One cluster for all tests that leave it as it was; what a test leaves in it is the test's failure."""
    before = actors_of(session_cluster)
    yield session_cluster
    is_idle(session_cluster)
    assert actors_of(session_cluster) == before, "an actor died"


def settings(model: Path, **keys: object) -> list[str]:
    """Return the `sets` of a small cluster on `model`."""
    return [f"{key}={value}" for key, value in {**BASE, "model.path": model, **keys}.items()]


def is_idle(cluster: Cluster, token: str = "") -> None:
    """Hold that nothing runs and nothing is held for nobody, within two seconds."""
    with Client(cluster.zmq, token=token) as client:

        def idle() -> bool:
            status, leaks = client.status(), client.leaks()
            work = [actor for actor in status["actors"] if actor["running"] or actor["waiting"]]
            return not (work or status["requests"] or any(leaks.values()))

        eventually(idle, 2.0, lambda: f"not idle: {client.status()} {client.leaks()}")


def actors_of(cluster: Cluster, token: str = "") -> dict[str, int]:
    """Return the incarnation of every actor."""
    with Client(cluster.zmq, token=token) as client:
        return {actor["name"]: actor["incarnation"] for actor in client.status()["actors"]}


def processes_of(run_id: str) -> list[psutil.Process]:
    """Return the actor processes of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if run_id in arguments and any(argument.startswith("pdactors.actors") for argument in arguments):
            found.append(process)
    return found


def _answers(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


def eventually(condition: Callable[[], object], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Wait until `condition` holds; fail with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(what if isinstance(what, str) else what())
        time.sleep(0.02)


# ---- The line protocol --------


@dataclass
class Answer:
    """What a JSON request got."""

    tokens: list[dict[str, Any]]
    end: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(token["text"] for token in self.tokens)

    @property
    def ids(self) -> list[int]:
        return [token["token_id"] for token in self.tokens]


class LineClient:
    """A blocking client of the TCP line protocol; every wait ends after `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float = 20.0, receive_buffer: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout_s)
        self.socket.connect((host, int(port)))
        self._lines = self.socket.makefile("rb")

    def send(self, line: bytes | str | dict[str, Any]) -> None:
        """Send one line; a dict as JSON."""
        if isinstance(line, dict):
            line = json.dumps(line)
        self.raw((line.encode() if isinstance(line, str) else line) + b"\n")

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def end_input(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def line(self) -> bytes:
        """Return the next line with its end; b"" when the server closed."""
        return self._lines.readline()

    def rest(self) -> bytes:
        """Return everything up to the server's close."""
        return self._lines.read()

    def event(self) -> dict[str, Any]:
        line = self.line()
        assert line.endswith(b"\n"), f"the server closed after {line!r}"
        event = json.loads(line)
        assert isinstance(event, dict)
        return event

    def answer(self) -> Answer:
        """Read the events of the one request in flight."""
        tokens = []
        while (event := self.event())["event"] == "token":
            tokens.append(event)
        return Answer(tokens, event)

    def ask(self, **fields: Any) -> Answer:
        self.send(fields)
        return self.answer()

    def plain(self) -> list[bytes]:
        """Read a plain answer: its lines as they were sent, without the final dot."""
        lines = []
        while (line := self.line()) != b".\n":
            assert line, f"the server closed after {lines}"
            lines.append(line)
        return lines

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


Dial = Callable[..., LineClient]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Open line protocol clients: `dial(cluster.tcp)`."""
    clients: list[LineClient] = []

    def opener(address: str, **options: Any) -> LineClient:
        clients.append(LineClient(address, **options))
        return clients[-1]

    yield opener
    for client in clients:
        client.close()


@pytest.fixture
def wait() -> Callable[..., None]:
    """Wait for a condition: `wait(condition, timeout_s, what_is_wrong_otherwise)`."""
    return eventually
