"""OpenAI bodies: what they become, and what is refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdactors.client_messages import RequestBody
from pdactors.errors import BadRequest
from pdactors.openai_messages import (
    IGNORED,
    MAX_ANSWERS,
    REFUSED,
    ChatBody,
    CompletionBody,
    OpenAIBody,
    field_of,
    read_body,
)

HI = {"messages": [{"role": "user", "content": "Hi"}]}
X = {"prompt": "x"}


def completion(**fields: Any) -> CompletionBody:
    return read_body(CompletionBody, json.dumps(X | fields).encode())


def chat(**fields: Any) -> ChatBody:
    return read_body(ChatBody, json.dumps(HI | fields).encode())


def test_defaults_are_openais() -> None:
    (request,) = completion().requests(seed=7)
    assert request == RequestBody(prompt="x", max_tokens=16, temperature=1.0, seed=7)
    (request,) = chat().requests(seed=7)
    assert (request.messages, request.temperature, request.seed) == (tuple(HI["messages"]), 1.0, 7)
    assert request.max_tokens == 2**20  # the gateway cuts it to what fits


def test_every_field_arrives() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 9, "stop": ["a", "b"],
        "ignore_eos": True, "priority": "batch", "deadline_ms": 10, "save_final_kv": False,
    }  # fmt: skip
    (request,) = completion(**fields, logprobs=3).requests(seed=7)
    expected = {"prompt": "x", **fields, "stop": ("a", "b"), "logprobs": 3}
    assert {name: getattr(request, name) for name in expected} == expected
    (request,) = chat(**fields, logprobs=True, top_logprobs=3).requests(seed=7)
    expected |= {"prompt": None}
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", [{"prompt": "x"}]),
        (["x", "y"], [{"prompt": "x"}, {"prompt": "y"}]),
        ([1, 2], [{"prompt_token_ids": (1, 2)}]),
        ([[1, 2], [3]], [{"prompt_token_ids": (1, 2)}, {"prompt_token_ids": (3,)}]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: list[dict[str, Any]]) -> None:
    assert completion(prompt=prompt).prompts() == expected


def test_several_answers_have_seeds_of_their_own_and_the_first_has_the_given_one() -> None:
    requests = completion(prompt=["x", "y"], n=3, seed=5).requests(seed=7)
    assert [(request.prompt, request.seed) for request in requests] == [
        (text, seed) for text in "xy" for seed in (5, 6, 7)
    ]


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_every_64_bit_seed_is_one_of_ours(seed: int) -> None:
    (request,) = completion(seed=seed).requests(seed=7)
    assert msgspec.convert(msgspec.to_builtins(request), RequestBody).seed == seed % 2**63


def test_logprobs_without_alternatives_are_still_asked_of_the_engine() -> None:
    for body in (completion(logprobs=0), chat(logprobs=True)):
        (request,) = body.requests(seed=7)
        assert (request.logprobs, body.num_alternatives) == (1, 0)
    for body in (completion(), chat(), chat(logprobs=False)):
        (request,) = body.requests(seed=7)
        assert (request.logprobs, body.num_alternatives) == (0, None)


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).limit() == 6
    assert chat(max_tokens=5).limit() == 5


def test_text_parts_are_put_together_and_developers_speak_as_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]
    (request,) = read_body(ChatBody, json.dumps({"messages": messages}).encode()).requests(seed=7)
    assert request.messages == ({"role": "system", "content": "ab"}, {"role": "user", "content": "c"})


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_changes_nothing_is_ignored(name: str) -> None:
    assert completion(**{name: "whatever"}) == completion()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    for neutral in (None, *REFUSED[name]):
        assert completion(**{name: neutral}) == completion()
    with pytest.raises(BadRequest, match=f"^{name}: is not supported") as refused:
        completion(**{name: {"some": "thing"}})
    assert field_of(CompletionBody, refused.value.message) == name


BAD: list[tuple[type[OpenAIBody], dict[str, Any] | bytes, str | None, str]] = [
    (CompletionBody, X | {"max_token": 3}, "max_token", "unknown field"),
    (CompletionBody, X | {"max_completion_tokens": 3}, "max_completion_tokens", "unknown field"),
    (ChatBody, HI | {"prompt": "x"}, "prompt", "unknown field"),
    (CompletionBody, X | {"max_tokens": 0}, "max_tokens", ">= 1"),
    (CompletionBody, X | {"max_tokens": 2.5}, "max_tokens", "int"),
    (CompletionBody, X | {"temperature": -1}, "temperature", ">= 0.0"),
    (CompletionBody, X | {"temperature": "hot"}, "temperature", "float"),
    (CompletionBody, X | {"top_p": 0}, "top_p", "> 0.0"),
    (CompletionBody, X | {"n": 0}, "n", ">= 1"),
    (CompletionBody, X | {"n": MAX_ANSWERS + 1}, "n", "<= 128"),
    (CompletionBody, X | {"seed": 2**63}, "seed", ""),
    (CompletionBody, X | {"stop": [""]}, "stop[0]", "length >= 1"),
    (CompletionBody, X | {"stream": 1}, "stream", "bool"),
    (CompletionBody, X | {"stream_options": {"usage": True}}, "stream_options", "usage"),
    (CompletionBody, X | {"logprobs": 21}, "logprobs", "<= 20"),
    (CompletionBody, X | {"logprobs": True}, "logprobs", "int"),
    (CompletionBody, X | {"priority": 1}, "priority", ""),
    (CompletionBody, {}, "prompt", "is needed"),
    (CompletionBody, {"prompt": None}, "prompt", "is needed"),
    (CompletionBody, {"prompt": []}, "prompt", "is empty"),
    (CompletionBody, {"prompt": ["x", 1]}, "prompt", "cannot be mixed"),
    (CompletionBody, {"prompt": [1, [2]]}, "prompt", "cannot be mixed"),
    (CompletionBody, {"prompt": [-1]}, "prompt[0]", ">= 0"),
    (CompletionBody, {"prompt": 1}, "prompt", ""),
    (CompletionBody, {"prompt": ["x"] * 65, "n": 2}, "prompt", "65 prompts with n = 2"),
    (ChatBody, {"messages": []}, "messages", "length >= 1"),
    (ChatBody, {"messages": ["x"]}, "messages[0]", "object"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text"),
    (ChatBody, HI | {"logprobs": 3}, "logprobs", "bool"),
    (ChatBody, HI | {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    (ChatBody, HI | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    (ChatBody, HI | {"tools": [{"type": "function"}]}, "tools", "not supported"),
    (ChatBody, HI | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (CompletionBody, b"", None, "malformed"),
    (CompletionBody, b"[]", None, "object"),
    (CompletionBody, b'{"prompt": "x"', None, "malformed"),
    (CompletionBody, b'{"prompt": "\xff"}', None, "malformed"),
    (CompletionBody, b'{"prompt": "x", "temperature": NaN}', None, "malformed"),
    (CompletionBody, b'{"prompt": ' + b"[" * 100_000, None, ""),
]


@pytest.mark.parametrize(("kind", "body", "field", "part"), BAD)
def test_a_bad_body_is_refused_with_the_field_named(
    kind: type[OpenAIBody], body: dict[str, Any] | bytes, field: str | None, part: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(BadRequest) as refused:
        read_body(kind, data).requests(seed=7)
    assert part in refused.value.message
    assert field_of(kind, refused.value.message) == field


def test_the_gateways_own_words_are_translated_into_fields() -> None:
    assert field_of(ChatBody, "prompt: 99 tokens leave none to generate") == "messages"
    assert field_of(ChatBody, "messages[1].role must be one of system, user") == "messages[1].role"
    assert field_of(CompletionBody, "prompt_token_ids: token id 400 is outside the vocabulary") == "prompt"
    assert field_of(CompletionBody, "the text is not valid Unicode") is None
