"""Free ports for a cluster that is started beside one that may be running."""

from __future__ import annotations

from pdactors.config.cluster import ClusterConfig


def free_ports(config: ClusterConfig) -> list[str]:
    """Return the settings that put the file's sockets on free ports of the same hosts, and the ZeroMQ one on."""
    addresses = {
        "listen.tcp": config.listen.tcp,
        "listen.zmq": config.listen.zmq or "tcp://127.0.0.1:0",  # the client needs it
        "listen.http": config.listen.http,
        "router.control": config.router.control,
    }
    return [f"{key}={text.rpartition(':')[0]}:0" for key, text in addresses.items() if text]
