from __future__ import annotations

import socket

import pytest

from pdactors.config.address import Address, is_loopback, local_ip, parse_address
from pdactors.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070),
        ("tcp://127.0.0.1:0", "127.0.0.1", 0),
        ("node-1.example:65535", "node-1.example", 65535),
        ("tcp://*:7071", "*", 7071),
        ("[::1]:80", "::1", 80),
        ("tcp://[fe80::1]:80", "fe80::1", 80),
    ],
)
def test_host_and_port_are_read(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", "7070", "host", "host:", ":7070", "host:70000", "host:-1", "host:x", "::1:80", "[::g]:80"),
        *("[1.2.3.4]:80", "http://host:80", "host:80/path", "host:80\n", "a b:80", "host:\u0663"),
    ],
)
def test_anything_else_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert f'"{text}"' in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org", ""])
def test_everything_else_counts_as_reachable_from_outside(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("127.0.0.1:1", "localhost:1", True),
        ("127.0.0.1:1", "127.0.0.1:2", False),
        ("127.0.0.1:1", "127.0.0.2:1", False),
        ("0.0.0.0:1", "10.0.0.1:1", True),
        ("10.0.0.1:1", "*:1", True),
        ("[0:0:0:0:0:0:0:1]:1", "[::1]:1", True),
        ("127.0.0.1:0", "127.0.0.1:0", False),
    ],
)
def test_addresses_collide_when_they_share_host_and_port(one: str, other: str, expected: bool) -> None:
    assert parse_address(one).collides(parse_address(other)) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.7", socket.gethostname()])
def test_a_host_of_this_machine_has_an_address_here(host: str) -> None:
    found = local_ip(host)
    if host == socket.gethostname() and found is None:
        pytest.skip("this machine does not know its own name")
    assert found is not None
    socket.create_server((found, 0), family=socket.AF_INET6 if ":" in found else socket.AF_INET).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_elsewhere_or_nowhere_has_none(host: str) -> None:
    assert local_ip(host) is None


@pytest.mark.parametrize("text", ["10.0.0.1:7000", "[::1]:7000", "localhost:1"])
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_address(text)) == text
