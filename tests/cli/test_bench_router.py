"""`pdactors bench router`: a real gateway process, and decisions of simulated fleets."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pdactors.bench import fanout
from pdactors.cli.main import main
from pdactors.errors import PDError
from pdactors.sim import decisions


def test_decisions_and_fan_out_are_measured(tiny_model, monkeypatch):
    monkeypatch.setattr(decisions, "SIZES", (2, 10))
    arguments = ["--model", str(tiny_model), "--requests", "100", "--streams", "8", "--tokens", "20", "--json"]
    result = CliRunner().invoke(main, ["bench", "router", *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["workers"] for one in found["decisions"]] == [2, 10]
    assert all(0 < one["p50_us"] <= one["p99_us"] for one in found["decisions"])
    assert found["fanout_tokens_s"] > 0
    assert found["fanout"]["streams"] == 8


def test_tokens_that_do_not_come_are_missed(tiny_model, monkeypatch):
    monkeypatch.setattr(fanout._Talker, "step", lambda *_: None)
    monkeypatch.setattr(fanout, "PATIENCE_S", 15.0)
    monkeypatch.setattr(fanout, "STALL_S", 0.1)
    with pytest.raises(PDError, match="0 of 16 tokens came"):
        fanout.measure_fanout(str(tiny_model), streams=2, tokens=8)
