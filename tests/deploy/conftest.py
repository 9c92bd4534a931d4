"""Two machines of their own for what `deploy/` starts on several."""

from __future__ import annotations

import pytest
from netns import two_hosts

hosts = pytest.fixture(two_hosts, name="hosts")


@pytest.fixture
def small() -> dict[str, str]:
    """What makes a cluster file's nodes small, as environment variables; the model is to be added."""
    return {"PDACTORS_KV_MEMORY": "64MiB", "PDACTORS_MODEL_DTYPE": "float32", "PDACTORS_MODEL_MAX_MODEL_LEN": "2048"}
