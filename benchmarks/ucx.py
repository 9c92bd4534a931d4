"""UCX beside a raw socket: GB/s, CPU seconds per GB of both ends (also with checksums), and what an idle port costs.

On loopback and, as root, between two network namespaces.

    .venv/bin/python benchmarks/ucx.py [--block-bytes 737280] [--transfers 100] [--rounds 3] [--rate 1gbit]
"""

from __future__ import annotations

import argparse
import os

import msgspec

from pdactors.bench import wire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--transfers", type=int, default=100, help="of 16 blocks each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="", help="limit the wire between the namespaces, such as 1gbit")
    chosen = parser.parse_args()
    sizes = {"block_bytes": chosen.block_bytes, "num_transfers": chosen.transfers, "rounds": chosen.rounds}
    found = {"loopback": wire.compare(**sizes, checked=True)}
    if os.geteuid() == 0:
        with wire.namespaces(chosen.rate) as sides:
            found["namespaces"] = wire.compare(sides, **sizes, checked=True)
    print(msgspec.json.format(msgspec.json.encode(found)).decode())


if __name__ == "__main__":
    main()
