"""`pdactors simulate` as a command."""

from __future__ import annotations

import json

from click.testing import CliRunner

from pdactors.cli.main import main


def test_without_a_choice_every_mode_is_simulated():
    asked = ["simulate", "--lengths", "40:4", "--requests", "5", "--json"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    servers = json.loads(result.stdout)["servers"]
    assert list(servers) == ["colocated", "chunked", "disaggregated", "kvstore"]
    assert all(server["overall"]["done"] == 5 for server in servers.values())


def test_a_store_that_cannot_be_is_refused_by_name():
    asked = ["simulate", "--requests", "5", "--modes", "kvstore", "--set", "kv.store=mooncake://127.0.0.1:9"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1
    assert "mooncake://127.0.0.1:9 cannot be simulated" in result.output
