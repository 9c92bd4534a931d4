"""The Kubernetes manifests as data, and what a pod's container is started with."""

from __future__ import annotations

import re
from typing import Any

import yaml
from pages import ROOT

HERE = ROOT / "deploy" / "kubernetes"
WORKLOADS = {"router": "Deployment", "engines": "StatefulSet"}
KUSTOMIZATION = yaml.safe_load((HERE / "kustomization.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    manifest for file in KUSTOMIZATION["resources"] for manifest in yaml.safe_load_all((HERE / file).read_text())
]


def named(kind: str) -> dict[str, dict[str, Any]]:
    """Return all of a kind, by name."""
    return {manifest["metadata"]["name"]: manifest for manifest in MANIFESTS if manifest["kind"] == kind}


def workload(part: str) -> dict[str, Any]:
    return named(WORKLOADS[part])[f"pdactors-{part}"]


def pod(part: str) -> dict[str, Any]:
    """Return the specification of a workload's pods."""
    spec = workload(part)["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def arguments(part: str, name: str, address: str) -> list[str]:
    """Return the container's arguments as the kubelet passes them in the pod of that name and address."""
    (container,) = pod(part)["containers"]
    fields = {"metadata.name": name, "status.podIP": address}
    values = {entry["name"]: fields[entry["valueFrom"]["fieldRef"]["fieldPath"]] for entry in container["env"]}
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], argument) for argument in container["args"]]
