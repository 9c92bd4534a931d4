from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdactors.bench import kv, needles
from pdactors.bench.needles import Asker, NeedlesAt, NeedlesBench, bench_needles, make_questions
from pdactors.cli.main import main
from pdactors.engine.load import load_model
from pdactors.errors import ModelError
from pdactors.text.tokenizer import Tokenizer


def test_a_fact_stands_at_the_start_and_is_asked_for_at_the_end(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    questions = make_questions(tokenizer, 3, 500, seed=1)
    for question, city in zip(questions, ("Paris", "Rome", "Berlin"), strict=True):
        text = tokenizer.decode(question.prompt)
        assert f"The secret number of {city} is {question.answer}." in text[:80]
        assert f"What is the secret number of {city}?" in text[-70:]
        assert text.count(question.answer) == 1
        assert 250 < len(question.prompt) <= 500
    assert len({question.answer for question in questions}) == 3
    assert questions == make_questions(tokenizer, 3, 500, seed=1) != make_questions(tokenizer, 3, 500, seed=2)


def test_without_a_chat_template_the_prompt_ends_where_the_answer_begins(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer(tmp_path)
    (question,) = make_questions(tokenizer, 1, 500, seed=1)
    text = tokenizer.decode(question.prompt)
    assert text.startswith(f"The secret number of Paris is {question.answer}.")
    assert text.endswith("What is the secret number of Paris?\nAnswer:")


def test_a_model_with_too_few_positions_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="8192 positions are too few"):
        bench_needles(str(tiny_model), dtype="float32", lengths=(8190,))


def test_after_all_of_the_kv_the_answer_is_the_same_wherever_it_lies(tiny_model: Path) -> None:
    model, tokenizer = load_model(tiny_model, "float32", way="lean"), Tokenizer(tiny_model)
    asker = Asker(model, tokenizer, 700)
    answers = [asker.ask(question.prompt, 1.0) for question in make_questions(tokenizer, 3, 700, seed=1)]
    assert all(whole == pruned for whole, pruned in answers)
    assert len({whole for whole, _ in answers}) > 1
    pruned = [asker.ask(question.prompt, 0.1) for question in make_questions(tokenizer, 3, 700, seed=1)]
    assert any(whole != pruned for whole, pruned in pruned)


@pytest.mark.slow
def test_the_real_model_still_knows_a_fact_of_a_pruned_prompt(real_model: Path) -> None:
    found = bench_needles(str(real_model), questions=12, lengths=(384,))
    assert found.lengths["384"].whole >= needles.LEAST
    assert found.ratio is not None
    assert found.ratio >= 0.8


class FakeAsker:
    """Answers the first six of ten questions after all of a short prompt, four of them after pruning."""

    def __init__(self, model: object, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.asked = 0
        self.pruning_s: list[float] = []

    def ask(self, prompt: list[int], share: float) -> tuple[str, str]:
        number, self.asked = self.asked % 10, self.asked + 1
        self.pruning_s.append(0.001 * number)
        right = " ".join(map(str, range(1000, 10000)))
        is_short = self.asked <= 10
        return right if is_short and number < 6 else "no", right if number in (0, 1, 2, 3, 9) else "no"


def test_only_what_is_answered_after_all_of_the_kv_counts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needles, "Asker", FakeAsker)
    monkeypatch.setattr(needles, "LEAST", 6)
    found = bench_needles(str(tiny_model), dtype="float32", questions=10, lengths=(256, 512))
    assert found.lengths == {"256": NeedlesAt(6, 5, 4, 0.667, 4.5), "512": NeedlesAt(0, 5, 0, None, 4.5)}
    assert found.ratio == 0.667


@pytest.mark.parametrize(("prune", "share"), [(1.0, 0.7), (0.5, 0.5)])
def test_the_command_asks_with_the_share_of_the_file(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, prune: float, share: float
) -> None:
    def ask(path: str, **options: object) -> NeedlesBench:
        assert (path, options["dtype"]) == (str(tiny_model), "float32")
        return NeedlesBench(options["share"], 30, 10, {"256": NeedlesAt(20, 19, 18, 0.9, 12.0)}, 0.9)

    monkeypatch.setattr(kv, "bench_needles", ask)
    sets = {"model.path": tiny_model, "model.dtype": "float32", "kv.prune": prune, "kv.memory": "8MiB"}
    arguments = ["bench", "kv", "--only", "prune"]
    arguments += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["paths"], found["codecs"]) == ({}, {})
    assert (found["prune"]["share"], found["prune"]["lengths"]["256"]["both"]) == (share, 18)
    shown = CliRunner().invoke(main, arguments).stdout
    assert f"{share} of a prompt of 256 tokens: 18 of the 20 questions" in " ".join(shown.split())
