from __future__ import annotations

import pytest

from pdactors.errors import ConfigError
from pdactors.transport import Address, transport_for


def test_a_bare_host_and_port_is_tcp():
    assert str(Address.parse("127.0.0.1:70")) == "tcp://127.0.0.1:70"


def test_ipv6_hosts_are_written_in_brackets():
    assert Address.parse("tcp://[::1]:70").host_port == ("::1", 70)
    assert Address.parse("tcp://[::1]:70").is_loopback


@pytest.mark.parametrize("text", ["", "tcp://", "localhost", "tcp://:1", "a:70000", "a:-1", "a:b"])
def test_a_malformed_address_is_refused(text: str):
    with pytest.raises(ConfigError):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.9:1", True), ("localhost:1", True), ("0.0.0.0:1", False), ("10.0.0.1:1", False), ("host:1", False)],
)
def test_only_loopback_addresses_count_as_loopback(text: str, loopback: bool):
    assert Address.parse(text).is_loopback is loopback


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: tcp, inproc"):
        transport_for("carrier-pigeon://a")
