import asyncio
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from pdactors.bench import verify as verification
from pdactors.bench.reference import Expected
from pdactors.bench.verify import ModeResult, Questions, ask, verify
from pdactors.cli.main import main
from pdactors.config.load import load
from pdactors.engine.manifest import silent
from pdactors.errors import ConfigError, WorkerLost

MARGINS = (2.0, 0.0004, 3.0)
EXPECTED = Expected((7, 8, 9), MARGINS, ((), (5, 6), ()))


def sets_for(model, **keys):
    """Return the settings of a small cluster, with ports that are taken."""
    base = {"model.path": model, "model.max_model_len": 512, "kv.memory": "8MiB"}
    return [f"{key}={value}" for key, value in {**base, **keys}.items()]


def arguments(model, *more, **keys):
    sets = [part for value in sets_for(model, **keys) for part in ("--set", value)]
    return ["verify", "--prompts", "6", "--max-tokens", "8", *sets, *more]


# ---- Comparing --------


def counted(answer):
    result = ModeResult()
    result.count(3, EXPECTED, answer)
    return result


def test_the_same_tokens_are_equal():
    result = counted((7, 8, 9))
    assert (result.equal, result.tied, result.ties, result.diverged) == (1, 0, [], [])
    assert result.is_good


@pytest.mark.parametrize("token_id", [5, 6])
def test_a_token_whose_logit_is_the_bests_but_for_rounding_is_tied(token_id):
    result = counted((7, token_id, 1, 2))
    (tie,) = result.ties
    assert (result.equal, result.tied, result.diverged) == (0, 1, [])
    assert (tie.prompt, tie.position, tie.expected, tie.got, tie.margin) == (3, 1, 8, token_id, 0.0004)
    assert result.is_good


@pytest.mark.parametrize(
    ("answer", "position", "expected", "got", "margin"),
    [
        pytest.param((6, 8, 9), 0, 7, 6, 2.0, id="another token"),
        pytest.param((7, 9, 9), 1, 8, 9, 0.0004, id="another token than the tied ones"),
        pytest.param((7, 8, 9, 9), 3, None, 9, None, id="too long"),
        pytest.param((7, 8), 2, 9, None, 3.0, id="too short"),
        pytest.param((7,), 1, 8, None, 0.0004, id="ended at a tie"),
        pytest.param((), 0, 7, None, 2.0, id="empty"),
    ],
)
def test_any_other_difference_is_a_divergence(answer, position, expected, got, margin):
    result = counted(answer)
    (found,) = result.diverged
    assert (result.equal, result.tied) == (0, 0)
    assert (found.prompt, found.position, found.expected, found.got) == (3, position, expected, got)
    assert found.margin == margin
    assert not result.is_good


def test_an_error_is_a_divergence_with_its_text():
    result = counted(WorkerLost("n0/decode-0 is gone"))
    (found,) = result.diverged
    assert (found.prompt, found.position, found.error) == (3, None, "worker_lost: n0/decode-0 is gone")
    assert not result.is_good


def test_a_mode_that_did_not_start_is_not_good():
    assert not ModeResult(error="no").is_good


# ---- The cluster file --------


def test_only_mode_dtype_and_ports_differ_from_the_file(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[model]\ndtype = "bfloat16"\n[kv]\nblock_tokens = 16\n[listen]\ntcp = "[::1]:7000"\nzmq = ""\nhttp = ""\n'
        '[router]\ncontrol = "tcp://127.0.0.2:9000"\n[[node]]\ndecode = 2\n'
    )
    config = load(file, sets=verification._overrides(load(file), "chunked", "float16"))
    assert (config.cluster.mode, config.model.dtype) == ("chunked", "float16")
    assert (config.listen.tcp, config.listen.zmq, config.listen.http) == ("[::1]:0", "tcp://127.0.0.1:0", "")
    assert config.router.control == "tcp://127.0.0.2:0"
    assert (config.kv.block_tokens, config.node) == (16, load(file).node)


def test_answers_that_fill_the_model_leave_no_prompt(tiny_model):
    with pytest.raises(ConfigError, match=r"model.max_model_len = 512: answers of 512 tokens"):
        verify(None, sets=sets_for(tiny_model), max_tokens=512)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--modes", "disaggregated,fast"], "'fast' is none of colocated, chunked, disaggregated, kvstore"),
        (["--set", "model.dtype=float32"], "--set model.dtype: use --dtype"),
        (["--set", "cluster.mode=chunked"], "--set cluster.mode: use --modes"),
        (["--prompts", "0"], "--prompts"),
    ],
)
def test_wrong_usage_exits_2(more, text):
    result = CliRunner().invoke(main, ["verify", *more])
    assert result.exit_code == 2
    assert text in result.output


# ---- Running --------


def other_weights(model, folder):
    """Copy a model with other logits."""
    shutil.copytree(model, folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.lm_head.weight.neg_()
    network.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_right_cluster_is_equal_to_transformers_and_prints_only_json(tiny_model, home):
    command = [sys.executable, "-m", "pdactors.cli.main", *arguments(tiny_model, "--json")]
    done = subprocess.run(command, capture_output=True, timeout=200)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (found["dtype"], found["prompts"], list(found["modes"])) == ("float32", 6, ["disaggregated"])
    result = found["modes"]["disaggregated"]
    assert (result["equal"] + result["tied"], result["diverged"], result["error"]) == (6, [], None)
    assert result["equal"] >= 5
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_cluster_with_other_weights_than_the_reference_is_found_out(tiny_model, cluster, tmp_path, monkeypatch):
    wrong, right = other_weights(tiny_model, tmp_path / "other"), verification.Job

    def job(_folder, *rest):
        return right(str(wrong), *rest)

    monkeypatch.setattr(verification, "Job", job)
    monkeypatch.setattr(verification, "launch", lambda *_, **__: nullcontext(cluster))
    result = CliRunner().invoke(main, arguments(tiny_model, "--modes", "disaggregated"))
    assert result.exit_code == 1, result.output
    assert "disaggregated: 0 equal, 0 tied, 6 diverged" in result.output
    assert "  diverged: prompt 0, position 0: expected " in result.output


def test_a_difference_is_one_only_if_the_reference_alone_agrees(monkeypatch):
    padded, alone = Expected((1,), (2.0,), ((),)), Expected((4,), (2.0,), ((),))
    jobs = []

    def generate(job):
        jobs.append(job)
        return ((i, alone if job.batch == 1 else padded) for i in reversed(range(len(job.prompts))))

    async def answers(*_arguments, **_options):
        return [(1,), (4,), (5,), WorkerLost("gone")]

    monkeypatch.setattr(verification.reference, "generate", generate)
    monkeypatch.setattr(verification, "ask", answers)
    monkeypatch.setattr(verification, "count_preempted", lambda *_: 0)
    questions = Questions([(7,), (8,), (9,), (6,)], max_tokens=1, concurrency=1)
    wanted = verification._Reference(Path("model"), "float32", questions, silent)
    for _ in range(2):
        result = verification._verify_mode(lambda: nullcontext(""), "", wanted, questions, lambda *_: None)
        assert (result.equal, result.tied) == (2, 0)
        assert [found.prompt for found in result.diverged] == [2, 3]
    assert [(job.prompts, job.batch) for job in jobs] == [
        (tuple(questions.prompts), verification.BATCH),
        (((8,), (9,)), 1),
    ]


def test_a_mode_that_cannot_start_is_reported(tiny_model, home, monkeypatch):
    monkeypatch.setattr(
        verification.reference, "generate", lambda job: ((i, EXPECTED) for i in range(len(job.prompts)))
    )
    keys = {"listen.tcp": "192.0.2.1:7070", "security.token": "secret-word"}  # an address of nobody
    result = CliRunner().invoke(main, arguments(tiny_model, "--json", **keys))
    assert result.exit_code == 1
    found = json.loads(result.stdout)["modes"]["disaggregated"]
    assert found["error"].startswith("the cluster ended with status 1 before it was ready")
    assert (found["equal"], found["tied"], found["diverged"]) == (0, 0, [])
    assert "cannot listen there" in found["error"]
    assert "secret-word" not in result.output


def test_what_this_version_cannot_do_is_the_clusters_own_error(tiny_model, monkeypatch):
    def refuse(_config):
        raise ConfigError("kv.transport 'cuda_ipc' is not available in this version; use auto, lease or ucx")

    monkeypatch.setattr(verification.blueprint, "check_available", refuse)
    result = CliRunner().invoke(main, arguments(tiny_model, "--modes", "kvstore", "--json"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not available in this version" in result.stderr


def test_every_question_gets_its_own_answer_or_error(cluster):
    prompts = [(5, 6, 7), (10**6,), (5, 6, 7), ()]
    done = []
    questions = Questions(prompts, max_tokens=4, concurrency=2)
    answers = asyncio.run(ask(cluster.zmq, questions, progress=lambda *counts: done.append(counts)))
    assert len(answers[0]) == 4
    assert answers[2] == answers[0]
    assert "outside the vocabulary" in answers[1].message
    assert "is empty" in answers[3].message
    assert done == [(count, 4) for count in range(5)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_real_model_is_equal_to_transformers(real_model):
    command = [sys.executable, "-m", "pdactors.cli.main", "verify", "--json", "--prompts", "32"]
    done = subprocess.run([*command, "--modes", "disaggregated"], capture_output=True, timeout=1400)
    assert done.returncode == 0, (done.stdout, done.stderr)
    result = json.loads(done.stdout)["modes"]["disaggregated"]
    assert (result["equal"] + result["tied"], result["diverged"], result["error"]) == (32, [], None)
