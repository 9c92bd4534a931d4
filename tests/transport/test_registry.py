from __future__ import annotations

import pytest

from pdactors.errors import ConfigError
from pdactors.transport import transport_for


@pytest.mark.parametrize("address", ["carrier-pigeon://a", "127.0.0.1:70", ""])
def test_an_unknown_scheme_names_the_known_ones(address: str):
    with pytest.raises(ConfigError, match="known: tcp, inproc"):
        transport_for(address)
