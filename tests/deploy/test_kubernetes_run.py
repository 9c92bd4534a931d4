"""The pods' own commands and probes, run on two machines on which a hosts file is the cluster's DNS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from manifests import HERE, arguments, pod
from netns import PDACTORS, Host

from pdactors import Client
from pdactors.config.keys import make_keys
from pdactors.config.load import load
from pdactors.transport.zmq import make_pair

NAMES = {"router": "pdactors-router", "engines": "pdactors-engines-0"}
IN_POD = (
    'mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/run" /run && exec "$@"'  # `ip netns exec` unshares mounts
)


class Pod:
    """A pod of a workload: its folders, and its commands as they are but for two paths."""

    def __init__(self, part: str, host: Host, folder: Path, keys: Path) -> None:
        self.part, self.host, self.folder = part, host, folder
        self._paths = {"/etc/pdactors": HERE, "/secrets": keys}
        (folder / "run" / "pdactors").mkdir(parents=True)
        assert self.run(pod(part)["initContainers"][0]["command"]) == 0

    def _inside(self, words: Sequence[str]) -> list[str]:
        for path, folder in self._paths.items():
            words = [word.replace(path, str(folder)) for word in words]
        return ["sh", "-c", IN_POD, str(self.folder), *words]

    def run(self, command: Sequence[str]) -> int:
        return self.host.run(self._inside(command)).returncode

    @contextmanager
    def launched(self, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        launch = arguments(self.part, NAMES[self.part], self.host.address)
        with self.host.popen(self._inside([*PDACTORS, *launch]), env={**os.environ, **environ}) as process:
            try:
                yield process
            finally:
                process.kill()

    def has_started(self) -> bool:
        return self.run(pod(self.part)["containers"][0]["startupProbe"]["exec"]["command"]) == 0


@pytest.mark.slow
def test_the_router_s_and_an_engine_s_pod_serve_and_drain(
    hosts: list[Host], tmp_path: Path, home: Path, tiny_model: Path, small: dict[str, str], wait: Any
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, make_pair)
    config = load(HERE / "cluster.toml", environ={})
    at = dict(zip(NAMES.values(), hosts, strict=True))
    dns = "".join(f"{at[node.name].address} {node.host}\n" for node in config.node if node.name in at)
    pods = {}
    for part, name in NAMES.items():
        folder = tmp_path / part
        folder.mkdir()
        (folder / "hosts").write_text(dns)
        pods[part] = Pod(part, at[name], folder, keys)
    environ = {**small, "PDACTORS_MODEL_PATH": str(tiny_model)}
    with pods["engines"].launched(environ) as engine, pods["router"].launched(environ) as router:

        def serves() -> bool:
            assert (engine.poll(), router.poll()) == (None, None)
            return hosts[0].serves()

        wait(serves, 150.0, "the readiness probe never succeeds")
        wait(lambda: all(pod.has_started() for pod in pods.values()), 30.0, "a startup probe never succeeds")
        token = (keys / "token").read_text().strip()
        with hosts[0].entered(), Client("tcp://10.77.0.1:7071", token=token, key=keys / "client.key") as client:
            answer = client.generate("the cat sat on the mat", max_tokens=8, ignore_eos=True)
            assert len(answer.token_ids) == 8
            assert {a["node"] for a in client.status()["actors"] if a["role"] == "decode"} == {NAMES["engines"]}
        assert pods["router"].run([*PDACTORS, "status", "--token", token]) == 0
        engine.terminate()
        assert engine.wait(30.0) == 0  # well before cluster.drain_s, since nothing runs
        assert not pods["engines"].has_started()
        router.terminate()
        assert router.wait(30.0) == 0
