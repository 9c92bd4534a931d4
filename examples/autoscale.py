"""Prefill and decode scaled apart, on one node: python examples/autoscale.py --node n0 --max-prefill 3 --max-decode 2

Every period it reads /metrics. A role gets one more engine where requests wait and its engines are busy, and one fewer
where nothing waits for it and those that are left would not be busy. The cluster drains what goes, and refuses what
does not fit. Secrets come from the environment: PDACTORS_SECURITY_TOKEN, and --key with security.curve.
"""

import argparse
import os
import time
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pdactors import Client, PDError

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Seen:
    """What one scrape says of a role."""

    engines: int  # ready, on our node
    waiting: float  # requests, at its engines anywhere and at the router, which keeps those that no engine has room for
    busy_s: dict[str, float]  # since it started, by engine of our node


def look(url: str, token: str, node: str, role: str) -> Seen:
    """Read /metrics; raises OSError where the gateway does not answer."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    here = [sample for sample in samples if sample.labels.get("role") == role and sample.labels["node"] == node]
    return Seen(
        engines=sum(sample.value == 1 for sample in here if sample.name == "pdactors:up"),
        waiting=sum(
            sample.value
            for sample in samples
            if sample.name == "vllm:num_requests_waiting" and sample.labels["role"] in (role, "router")
        ),
        busy_s={s.labels["actor"]: s.value for s in here if s.name == "pdactors:busy_seconds_total"},
    )


def busy_share(before: Seen, now: Seen, seconds: float) -> float:
    """Return the mean share of the time between two scrapes that engines were in steps, 0 to 1."""
    both = before.busy_s.keys() & now.busy_s.keys()
    spent = sum(max(0.0, now.busy_s[name] - before.busy_s[name]) for name in both)  # one that was restarted counts anew
    return min(1.0, spent / seconds / len(both)) if both else 0.0


def decide(engines: int, waiting: float, busy: float, most: int, grow_at: float, shrink_below: float) -> int:
    """Return how many engines a role is to have: one more, one fewer, or as many as now."""
    if waiting and busy >= grow_at:
        return max(engines, min(engines + 1, most))
    if not waiting and engines > 1 and busy * engines / (engines - 1) < shrink_below:
        return engines - 1
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:7080", help="the gateway's, for /metrics")
    parser.add_argument("--zmq", default="tcp://127.0.0.1:7071", help="the gateway's, to scale")
    parser.add_argument("--key", default="", help="a CURVE key, where security.curve is on")
    parser.add_argument("--node", default="n0")
    parser.add_argument("--period", type=float, default=15.0, help="seconds")
    parser.add_argument("--grow-at", type=float, default=0.8, help="busy share of the engines that there are")
    parser.add_argument("--shrink-below", type=float, default=0.5, help="busy share that those left would have")
    for role in ROLES:
        parser.add_argument(f"--max-{role}", type=int, default=2)
    options = parser.parse_args()
    token = os.environ.get("PDACTORS_SECURITY_TOKEN", "")
    last: dict[str, tuple[float, Seen]] = {}
    with Client(options.zmq, token=token, key=options.key) as client:
        while True:
            for role in ROLES:
                try:
                    now_s, now = time.monotonic(), look(options.http, token, options.node, role)
                    before_s, before = last.get(role, (now_s, None))
                    last[role] = now_s, now
                    if before is None:
                        continue
                    busy = busy_share(before, now, now_s - before_s)
                    most, limits = getattr(options, f"max_{role}"), (options.grow_at, options.shrink_below)
                    count = decide(now.engines, now.waiting, busy, most, *limits)
                    if count != now.engines:
                        client.scale(options.node, role, count)
                        print(f"{role}: {now.engines} -> {count} ({now.waiting:.0f} wait, {busy:.0%} busy)", flush=True)
                except (PDError, OSError) as error:
                    print(f"{role}: {error}", flush=True)
            time.sleep(options.period)


if __name__ == "__main__":
    main()
