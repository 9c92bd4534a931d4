"""`scheme://rest`, and for TCP `host:port`. Owns parsing; opens nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pdactors.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """Where something listens, e.g. `tcp://127.0.0.1:7071` or `inproc://router`."""

    scheme: str
    rest: str

    @classmethod
    def parse(cls, text: str, *, default_scheme: str = "tcp") -> Address:
        """Parse `scheme://rest`; a bare `host:port` gets `default_scheme`.

        Raises:
            ConfigError: no rest, or a TCP address without a host or with a port outside 0..65535.
        """
        scheme, separator, rest = text.partition("://")
        if not separator:
            scheme, rest = default_scheme, text
        address = cls(scheme, rest)
        if not rest:
            raise ConfigError(f"address {text!r}: expected scheme://rest")
        if scheme == "tcp":
            _ = address.host_port
        return address

    @property
    def host_port(self) -> tuple[str, int]:
        """Return host and port of a TCP address; IPv6 hosts are written in brackets."""
        host, separator, port = self.rest.rpartition(":")
        if not separator or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"address {self}: expected host:port with a port from 0 to 65535")
        return host.strip("[]"), int(port)

    @property
    def is_loopback(self) -> bool:
        """Say whether only this host can reach it; a host name other than localhost counts as reachable."""
        if self.scheme != "tcp":
            return True
        host = self.host_port[0]
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> Address:
        """Return the same TCP address with another port."""
        host = self.rest.rpartition(":")[0]
        return Address(self.scheme, f"{host}:{port}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.rest}"
