"""The manifests are what Kubernetes takes, and agree with the cluster file, the command line and the image."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from manifests import HERE, KUSTOMIZATION, MANIFESTS, WORKLOADS, arguments, named, pod, workload
from pages import ROOT, parse

from pdactors.actors.blueprint import ENGINE_OVERHEAD_BYTES
from pdactors.config.address import parse_address
from pdactors.config.cluster import ClusterConfig
from pdactors.config.keys import CLUSTER, cluster_keys, make_keys
from pdactors.config.load import load
from pdactors.config.memory import parse_size

VERSION = "1.37"
POD_IP = "10.1.2.3"
every_workload = pytest.mark.parametrize("part", WORKLOADS)


def effective(part: str, name: str) -> ClusterConfig:
    """Return the configuration as the launch in a pod has it."""
    words = arguments(part, name, POD_IP)
    sets = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    return load(HERE / "cluster.toml", sets=sets, environ={})


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']} {m['metadata']['name']}")
def test_a_manifest_is_what_the_schemas_say(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_manifest_with_a_misspelt_key_is_found() -> None:
    wrong = {**MANIFESTS[0], "spec": {"selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_every_file_is_applied() -> None:
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    applied = {"kustomization.yaml", *KUSTOMIZATION["resources"], *generated["files"]}
    assert applied == {file.name for file in HERE.iterdir()}


@every_workload
def test_every_replica_launches_a_node_of_its_own_at_its_own_address(part: str) -> None:
    most = 3 if part == "engines" else 1
    assert workload(part)["spec"]["replicas"] <= most
    for name in [f"pdactors-{part}-{i}" for i in range(most)]:
        launch = arguments(part, name, POD_IP)
        parse([word.replace("/etc/pdactors", str(HERE)) for word in launch])
        node = next(word.removeprefix("--node=") for word in launch if word.startswith("--node="))
        assert node == (name if part == "engines" else "pdactors-router")
        assert effective(part, name).node_named(node).host == POD_IP


def test_other_nodes_find_each_other_by_services() -> None:
    config = load(HERE / "cluster.toml", environ={})
    services = named("Service")
    for node in config.node:
        pod_name, _, service = node.host.rpartition(".")
        assert services[service]["spec"]["clusterIP"] == "None", "a name must lead to the pod itself"
        assert pod_name in ("", node.name)
    assert services[config.node_named(config.router.node).host]["spec"]["publishNotReadyAddresses"]
    assert workload("engines")["spec"]["serviceName"] in services


def test_services_lead_to_the_ports_of_the_cluster_file() -> None:
    config = load(HERE / "cluster.toml", environ={})
    listening = {
        "tcp": config.listen.tcp,
        "zmq": config.listen.zmq,
        "http": config.listen.http,
        "control": config.router.control,
    }
    ports = {name: parse_address(text).port for name, text in listening.items()}
    (container,) = pod("router")["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    labels = {part: workload(part)["spec"]["template"]["metadata"]["labels"] for part in WORKLOADS}
    for service in named("Service").values():
        assert service["spec"]["selector"] in labels.values()
        for port in service["spec"].get("ports", []):
            assert (port["targetPort"], port["port"]) in ports.items()
    assert [port["port"] for port in named("NetworkPolicy")["pdactors-clients"]["spec"]["ingress"][0]["ports"]] == [
        name for name in ports if name != "control"
    ]
    for part in WORKLOADS:
        assert workload(part)["spec"]["selector"]["matchLabels"] == labels[part]


@every_workload
def test_a_pod_has_what_its_launch_needs(part: str) -> None:
    spec, config = pod(part), load(HERE / "cluster.toml", environ={})
    (container,) = spec["containers"]
    assert spec["enableServiceLinks"] is False, "variables like PDACTORS_PORT would be taken for keys"
    before_s = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1])
    assert spec["terminationGracePeriodSeconds"] >= before_s + config.cluster.drain_s + 5
    node = next(node for node in config.node if node.name.startswith(f"pdactors-{part}"))
    engines = sum(node.engines(config.cluster.mode).values())
    limit = parse_size(f"{container['resources']['limits']['memory']}B")
    assert limit > config.kv.memory_bytes + engines * ENGINE_OVERHEAD_BYTES + 2**29  # for weights
    assert int(container["resources"]["limits"]["cpu"]) > engines
    claimed = [claim["metadata"] for claim in workload(part)["spec"].get("volumeClaimTemplates", [])]
    volumes = {volume["name"] for volume in [*spec["volumes"], *claimed]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes == {*mounts, "secrets"}
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert f"PDACTORS_HOME={mounts['home']}\n" in dockerfile
    assert f"USER {spec['securityContext']['runAsUser']}\n" in dockerfile
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    assert {"name": "cluster", "configMap": {"name": generated["name"]}} in spec["volumes"]
    assert f"{mounts['cluster']}/{generated['files'][0]}" in container["args"]
    ready = next(word.removeprefix("--ready-file=") for word in container["args"] if word.startswith("--ready-file="))
    assert container["startupProbe"]["exec"]["command"] == ["test", "-e", ready]


@every_workload
def test_the_keys_of_the_secret_are_taken(part: str, tmp_path: Path) -> None:
    secrets, run = tmp_path / "secrets", tmp_path / "run"
    secrets.mkdir()
    run.mkdir()
    make_keys(tmp_path / "keys", lambda: ("a" * 40, "b" * 40))
    for key in (tmp_path / "keys").iterdir():
        key.chmod(0o440)  # as a volume of a secret has them for its group
        (secrets / key.name).symlink_to(key)
    ((container,), config) = pod(part)["initContainers"], load(HERE / "cluster.toml", environ={})
    command = [
        word.replace("/secrets", str(secrets)).replace("/run/pdactors", str(run)) for word in container["command"]
    ]
    for _ in range(2):  # a container may be started again
        subprocess.run(command, check=True)
    folder = run / Path(config.security.key_dir).relative_to("/run/pdactors")
    assert cluster_keys(folder).secret == "b" * 40
    assert (folder / f"{CLUSTER}.pub").exists()
    for file in (config.security.token_file, config.security.join_token_file):
        assert (run / Path(file).relative_to("/run/pdactors")).read_text().strip()
