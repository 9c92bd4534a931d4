from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pdactors.bench.kv import LENGTHS, PathResult, bench_kv, copy_reference, hand_over, summarise, tail_bytes
from pdactors.cli.main import main
from pdactors.client import Generation
from pdactors.client_messages import Timing, Usage
from pdactors.errors import ConfigError, PDError
from pdactors.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=32, dtype="bfloat16")


class FakeClient:
    """Answers as a cluster would; the n-th hand-over takes n milliseconds."""

    def __init__(self, *, path: str = "lease", cached_tokens: int = 0) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.path, self.cached_tokens = path, cached_tokens

    def generate(self, *, prompt_token_ids, max_tokens, ignore_eos):
        assert (max_tokens, ignore_eos) == (2, True)
        self.prompts.append(prompt_token_ids)
        timing = Timing(0.0, 0.0, float(len(self.prompts)), 0.0, 0.0, 0.0)
        usage = Usage(len(prompt_token_ids), 2, self.cached_tokens)
        return Generation("", (1, 2), "length", usage, timing, self.path, "r")


def test_short_and_long_prompts_take_turns_and_none_comes_twice():
    client = FakeClient()
    hand_over(client, rounds=3, vocab_size=50, seed=1)
    assert [len(prompt) for prompt in client.prompts] == list(LENGTHS) * 4
    assert len({prompt[:32] for prompt in client.prompts}) == 8
    assert {token for prompt in client.prompts for token in prompt} == set(range(50))


def test_the_first_round_is_not_counted():
    assert hand_over(FakeClient(), rounds=2, vocab_size=50, seed=1) == {64: [3000.0, 5000.0], 3000: [4000.0, 6000.0]}


def test_progress_is_told():
    steps = []
    hand_over(FakeClient(), rounds=2, vocab_size=50, seed=1, progress=lambda *step: steps.append(step))
    assert steps == [("hand over", done, 3) for done in range(3)]


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (FakeClient(path="none"), "64 tokens went by path 'none' with 0 tokens cached"),
        (FakeClient(cached_tokens=32), "64 tokens went by path 'lease' with 32 tokens cached"),
    ],
)
def test_a_prompt_that_was_not_handed_over_whole_is_an_error(client, text):
    with pytest.raises(PDError, match=text):
        hand_over(client, rounds=1, vocab_size=50, seed=1)


@pytest.mark.parametrize(("num_tokens", "copied"), [(64, 0), (3000, 737_280), (1, 737_280), (31, 737_280)])
def test_only_the_block_of_the_tail_is_copied(num_tokens, copied):
    assert tail_bytes(LAYOUT, num_tokens) == copied


def test_a_path_is_summed_up_by_medians_and_held_against_memcpy():
    times = {64: [100.0, 900.0, 200.0], 3000: [400.0, 300.0, 9000.0]}
    assert summarise(times, LAYOUT, 8.0) == PathResult(
        gb_s=172.8,  # 3000 * 23,040 bytes in 400 us
        limit_gb_s=8.0,
        ratio=21.6,
        bytes_copied={"64": 0, "3000": 737_280},
        us_per_handover={"64": 200.0, "3000": 400.0},
        p90_us={"64": 760.0, "3000": 7280.0},
        difference_us=200.0,
    )


def test_a_copy_is_timed():
    copy = copy_reference(1 << 20)
    assert copy.size_bytes == 1 << 20
    assert copy.gb_s == pytest.approx(copy.size_bytes / copy.us / 1e3, rel=0.02, abs=0.01)


def test_a_model_that_is_too_short_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"model.max_model_len = 2048: this measurement needs 3002"):
        bench_kv(None, sets=["model.max_model_len=2048"])


# ---- The command --------


def run(model, *more):
    sets = {"model.path": model, "model.dtype": "float32", "model.max_model_len": 4096, "kv.memory": "8MiB"}
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    return CliRunner().invoke(main, ["bench", "kv", "--only", "lease", "--rounds", "2", *arguments, *more])


@pytest.mark.slow
def test_the_command_measures_a_cluster_of_its_own(tiny_model, home):
    result = run(tiny_model, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["rounds"], found["dtype"], found["block_tokens"]) == (2, "float32", 32)
    lease = found["paths"]["lease"]
    assert lease["bytes_copied"] == {"64": 0, "3000": found["block_bytes"]}
    assert set(lease["us_per_handover"]) == {"64", "3000"}
    assert all(0 < us < 1e6 for us in lease["us_per_handover"].values())
    assert lease["limit_gb_s"] == found["memcpy"]["kv"]["gb_s"]
    assert found["memcpy"]["block"]["size_bytes"] == found["block_bytes"]


def test_the_command_shows_a_table_without_json(monkeypatch):
    import pdactors.bench.kv as bench

    memcpy = {"block": bench.Reference(737_280, 100.0, 7.37), "kv": bench.Reference(69_120_000, 9000.0, 7.68)}
    path = summarise({64: [1000.0], 3000: [1200.0]}, LAYOUT, 7.68)
    found = bench.KVBench("m", "bfloat16", 32, 737_280, 2, {"lease": path}, memcpy)
    monkeypatch.setattr(bench, "bench_kv", lambda file, **options: found)
    result = CliRunner().invoke(main, ["bench", "kv"])
    assert result.exit_code == 0
    for text in ("lease", "3000", "1,200", "737,280", "200 us more", "memcpy of one block: 737,280 bytes"):
        assert text in result.stdout


def test_rounds_below_one_are_wrong_usage():
    assert CliRunner().invoke(main, ["bench", "kv", "--rounds", "0"]).exit_code == 2
