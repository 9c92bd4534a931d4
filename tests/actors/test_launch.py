"""What a launch says where it cannot listen."""

from __future__ import annotations

import socket

import pytest

from pdactors.actors.launch import bound
from pdactors.errors import ConfigError


def test_a_port_in_use_is_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        reason = f'listen.tcp = "{address}": cannot listen there: it is in use, .* choose another port'
        with pytest.raises(ConfigError, match=reason), bound("listen.tcp", address):
            pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="it is no address of this machine"), bound("listen.tcp", "192.0.2.1:0"):
        pass
