"""Network addresses as the cluster file writes them: `host:port` or `tcp://host:port`, IPv6 hosts in brackets."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass

from pdactors.errors import ConfigError

_ADDRESS = re.compile(r"(?:tcp://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - recognised here so that they can be refused


@dataclass(frozen=True)
class Address:
    """Where a socket is bound; port 0 stands for any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Say whether it stands for every address of the machine."""
        return self.host in _WILDCARDS

    def collides(self, other: Address) -> bool:
        """Say whether both cannot be bound at once on one machine."""
        if self.port == 0 or self.port != other.port:
            return False
        mine, theirs = _canonical(self.host), _canonical(other.host)
        return mine == theirs or bool(_WILDCARDS & {mine, theirs})


def parse_address(text: str) -> Address:
    """Read `host:port` or `tcp://host:port`; raises ConfigError that quotes the text."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise ConfigError(f'"{text}" is not an address: write HOST:PORT or tcp://HOST:PORT')
    host, port = found["ipv6"] or found["host"], int(found["port"])
    if port > 65535:
        raise ConfigError(f'"{text}": the port must be 0 to 65535')
    if found["ipv6"]:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ConfigError(f'"{text}": "{host}" is not an IPv6 address') from None
    return Address(host, port)


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(_canonical(host)).is_loopback
    except ValueError:
        return False


def local_ip(host: str) -> str | None:
    """Return the IP address of this machine that `host` stands for; None if it is another machine's, or nobody's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return str(address[0])
    return None


def _canonical(host: str) -> str:
    if host.lower() == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()
