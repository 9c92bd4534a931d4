"""`Hardware`: what a device and its links can do, as makers state it, and which share of that programs reach."""

from __future__ import annotations

from msgspec import Struct

from pdactors.errors import ConfigError


class Link(Struct, frozen=True):
    """A way that KV takes: bytes a second in each direction, and what a transfer takes besides."""

    bytes_s: float
    latency_s: float


class Links(Struct, frozen=True):
    """Between two nodes of one host, of one rack, and any others; `uplink` is what a rack has for the last."""

    host: Link
    rack: Link
    far: Link
    uplink_bytes_s: float


class Hardware(Struct, frozen=True):
    """One device. `flops_share` and `bytes_share` are what large products and long reads reach of the maker's rates."""

    name: str
    flops_s: float  # dense bfloat16
    bytes_s: float
    memory_bytes: float
    links: Links
    flops_share: float = 0.6
    attention_share: float = 0.45  # of flops_s, in the attention of prompts
    bytes_share: float = 0.8
    step_s: float = 1e-3  # that a step takes besides: schedule, launch, sample
    sequence_s: float = 10e-6  # for each sequence of it
    collective_s: float = 10e-6  # the latency of one all-reduce
    control_s: float = 0.2e-3  # a message from one process to another
    price: float = 1.0  # of a device, in any unit


def _network(gbit_s: float, device_bytes_s: float) -> Links:
    """Links of a host whose devices are joined at `device_bytes_s` and have a network port each."""
    port = gbit_s / 8 * 1e9
    return Links(Link(device_bytes_s, 10e-6), Link(port, 20e-6), Link(port, 40e-6), 8 * port)


# Rates: NVIDIA's data sheets of the A100 (2021), H100 (2023) and H200 (2024), SXM forms; links in one direction.
HARDWARE = {
    found.name: found
    for found in (
        Hardware("a100-80g", 312e12, 2.039e12, 80e9, _network(200, 300e9)),
        Hardware("h100", 989e12, 3.35e12, 80e9, _network(400, 450e9), price=2.0),
        Hardware("h200", 989e12, 4.8e12, 141e9, _network(400, 450e9), price=2.4),
        Hardware(  # one core of a Sapphire Rapids server with AMX
            "cpu", 0.84e12, 14e9, 16e9, Links(Link(1e9, 1e-4), Link(1e9, 1e-4), Link(1e9, 1e-4), 1e10),
            flops_share=0.5, attention_share=0.25, bytes_share=0.9, step_s=1.5e-3, sequence_s=1e-4, price=0.05,
        ),
    )
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """Return a preset; raises ConfigError that lists them."""
    if name.lower() not in HARDWARE:
        raise ConfigError(f"no hardware is called {name}; there are {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]
