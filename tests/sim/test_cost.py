"""Cost models: formulas by hand, curves, and files that are wrong."""

from __future__ import annotations

import json

import msgspec
import pytest

from pdactors.errors import ConfigError
from pdactors.sim.cost import Curve, StepWork, read_cost, roofline
from pdactors.sim.hardware import HARDWARE, find_hardware
from pdactors.sim.shapes import ModelSize

A100 = HARDWARE["a100-80g"]
LLAMA = ModelSize.find("llama-3-8b")


def test_a_curve_follows_its_points_and_its_last_slope():
    curve = Curve(((1, 2.0), (3, 4.0), (5, 10.0)))
    assert [curve.at(count) for count in (0, 1, 2, 3, 4, 5, 7)] == [0, 2, 3, 4, 7, 10, 16]


def test_sizes_of_the_presets_are_those_that_are_published():
    assert LLAMA.num_params / 1e9 == pytest.approx(8.03, rel=0.001)
    assert ModelSize.find("llama-3-70b").num_params / 1e9 == pytest.approx(70.55, rel=0.001)
    assert ModelSize.find("smollm2-135m").num_params / 1e6 == pytest.approx(134.5, rel=0.001)


def test_decode_reads_weights_and_kv_and_prompts_multiply():
    cost = roofline(LLAMA, "bfloat16", A100)
    read = A100.bytes_s * A100.bytes_share
    one = cost.step(StepWork(1, 1, 1000, 0, 1)) - cost.step_s - cost.sequence_s
    kv_bytes = 2 * 32 * 8 * 128 * 2 * 1000
    assert one == pytest.approx((2 * (LLAMA.body_params + LLAMA.head_params) + kv_bytes) / read, rel=1e-6)
    flops = 2 * LLAMA.body_params * 4000 + 4 * 128 * 32 * 32 * 8e6 * A100.flops_share / A100.attention_share
    many = cost.body.at(4000) + cost.pair_s * 8e6
    assert many == pytest.approx(flops / (A100.flops_s * A100.flops_share), rel=1e-6)


def test_more_devices_take_less_but_not_in_proportion():
    one, four = roofline(LLAMA, "bfloat16", A100), roofline(LLAMA, "bfloat16", A100, 4)
    work = StepWork(2000, 1, 0, 2e6, 1)
    assert one.step(work) / 4 < four.step(work) < one.step(work) / 2
    with pytest.raises(ConfigError, match="3 devices do not divide the 32 heads"):
        roofline(LLAMA, "bfloat16", A100, 3)


def test_a_cost_file_is_read_back_and_a_wrong_one_is_named(tmp_path):
    cost = roofline(LLAMA, "bfloat16", A100)
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(cost))
    assert read_cost(path) == cost
    for change, reason in (
        ({"version": 9}, "version 9"),
        ({"body": {"points": [[1, 1.0]]}}, "body: at least two points"),
        ({"head": {"points": [[2, 1.0], [1, 1.0]]}}, "head: at least two points"),
        ({"pair_s": "x"}, "pair_s"),
    ):
        path.write_text(json.dumps(json.loads(msgspec.json.encode(cost)) | change))
        with pytest.raises(ConfigError, match=reason):
            read_cost(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cost(tmp_path / "none.json")


def test_a_model_is_found_by_name_folder_or_file(tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"intermediate_size": 128}))
    assert ModelSize.find(str(tmp_path)) == ModelSize.find(str(path))
    assert ModelSize.find(str(path)).body_params == 2 * (4 * 64 * 64 + 3 * 64 * 128)
    for change, reason in (({"num_local_experts": 8}, "mixture"), ({"vocab_size": 0}, "vocab_size")):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=reason):
            ModelSize.find(str(path))
    with pytest.raises(ConfigError, match="llama-3-8b"):
        ModelSize.find("llama-9")
    with pytest.raises(ConfigError, match="a100-80g"):
        find_hardware("abacus")
