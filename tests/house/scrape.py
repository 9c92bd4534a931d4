"""What Prometheus would read of a cluster."""

from __future__ import annotations

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from pdactors import Cluster


class Scrape:
    """What one scrape found."""

    def __init__(self, cluster: Cluster) -> None:
        response = httpx2.get(f"http://{cluster.http}/metrics", timeout=10.0)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Add up the samples of a name that have these labels."""
        found = [sample for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()]
        assert found, name
        return sum(sample.value for sample in found)

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return whatever may only grow, by name and labels."""
        growing = [f for f in self.families.values() if f.type in ("counter", "histogram")]
        return {(s.name, frozenset(s.labels.items())): s.value for family in growing for s in family.samples}
