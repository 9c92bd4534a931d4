"""What the Ray launcher says and does before it meets Ray."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdactors.config.cluster import ClusterConfig, ClusterSection, ModelSection, NodeSection, SecuritySection
from pdactors.config.load import load
from pdactors.errors import ConfigError
from pdactors.launchers.contract import launcher_of
from pdactors.launchers.ray import _probe, _true_everywhere

RAY = ClusterConfig(cluster=ClusterSection(launcher="ray"))


def test_one_node_alone_is_not_for_it() -> None:
    with pytest.raises(ConfigError, match="places all nodes of the file, so --node is not for it"):
        launcher_of(RAY)(RAY, node="n0")


def test_the_file_that_nodes_get_needs_no_files_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("let-me-in")
    (tmp_path / "model").mkdir()
    config = ClusterConfig(
        security=SecuritySection(token_file="token"),
        model=ModelSection(path="model"),
        node=(NodeSection(host="localhost"),),
    )
    made = _true_everywhere(config)
    assert (made.security.token, made.security.token_file) == ("let-me-in", "")
    assert made.model.path == str(tmp_path / "model")
    assert made.node[0].host in ("127.0.0.1", "::1")


def test_actors_get_a_secret_of_the_runs_own_unless_the_file_has_one() -> None:
    made = {_true_everywhere(RAY).security.join_token for _ in range(2)}
    assert len(made) == 2
    assert min(map(len, made)) >= 32
    given = ClusterConfig(security=SecuritySection(join_token="sesame-0815"))
    assert _true_everywhere(given).security.join_token == "sesame-0815"


def test_a_bundled_model_and_a_hub_id_stay_as_they_are() -> None:
    assert _true_everywhere(RAY).model.path == RAY.model.path


def test_other_machines_need_no_secret_and_no_fixed_port_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[node]]\nname = "n0"\nhost = "10.0.0.1"\n[[node]]\nname = "n1"\nhost = "10.0.0.2"\n')
    load(file, sets=["cluster.launcher=ray"], environ={})
    with pytest.raises(ConfigError, match="join_token"):
        load(file, environ={})
    with pytest.raises(ConfigError, match=r"listen\.http.*security\.token"):
        load(file, sets=["cluster.launcher=ray", "listen.http=0.0.0.0:80"], environ={})


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("ray://10.0.0.1:10001", "must be HOST:PORT of the cluster itself"),
        ("10.0.0.1", "must be HOST:PORT"),
        ("127.0.0.1:9", "no Ray cluster answers there"),
    ],
)
def test_an_address_where_no_cluster_is_is_refused_at_once(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _probe(address)


def test_an_address_where_somebody_answers_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _probe(f"127.0.0.1:{listening.getsockname()[1]}")
    _probe("")
