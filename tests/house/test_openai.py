"""The official `openai` client against a cluster: texts and tokens are those of the line protocol."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from pdactors import Cluster
from pdactors.text.tokenizer import Tokenizer

CAT = "the cat sat"
CHAT = [{"role": "user", "content": "what is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 20}
LONG = {"prompt": "^", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}  # seconds
TOKEN = "open-sesame"


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster) as client:
        yield client


def client_of(cluster: Cluster, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key=key, max_retries=0, timeout=30.0)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    return model.id


@pytest.fixture
def line(cluster: Cluster, dial: Any) -> Any:
    """Ask over the line protocol."""
    return dial(cluster.tcp).ask


# ---- The same answers as elsewhere --------


def test_a_completion_is_what_the_line_protocol_says(client: openai.OpenAI, model: str, line: Any) -> None:
    expected = line(prompt=CAT, max_tokens=20)
    answer = client.completions.create(model=model, prompt=CAT, **GREEDY)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (expected.text, "length", 0, None)
    assert (answer.object, answer.model) == ("text_completion", model)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == expected.end["usage"]["prompt_tokens"]
    assert (usage.completion_tokens, usage.total_tokens) == (20, usage.prompt_tokens + 20)


def test_a_chat_goes_through_the_template(client: openai.OpenAI, model: str, line: Any) -> None:
    expected = line(messages=CHAT, max_tokens=20)
    answer = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert (answer.object, choice.finish_reason) == ("chat.completion", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.end["usage"]["prompt_tokens"]


def test_a_streamed_completion_comes_token_by_token(client: openai.OpenAI, model: str, line: Any) -> None:
    expected = line(prompt=CAT, max_tokens=20)
    chunks = list(client.completions.create(model=model, prompt=CAT, stream=True, **GREEDY))
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == [token["text"] for token in expected.tokens]
    assert (chunks[-1].choices[0].text, chunks[-1].choices[0].finish_reason) == ("", "length")
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_chat_ends_with_its_usage_if_that_is_asked_for(client: openai.OpenAI, model: str, line: Any) -> None:
    expected = line(messages=CHAT, max_tokens=20)
    *chunks, last = client.chat.completions.create(
        model=model, messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[:-1]] == [token["text"] for token in expected.tokens]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 20)
    assert last.usage.prompt_tokens == expected.end["usage"]["prompt_tokens"]


def test_each_chunk_has_the_usage_so_far_if_that_is_asked_for_as_vllms_clients_do(
    client: openai.OpenAI, model: str
) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": model, "stream": True, "stream_options": options, "n": 2, **GREEDY}
    for chunks in (
        [*client.completions.create(prompt="the cat sat", **asked)],
        [*client.chat.completions.create(messages=CHAT, **asked)],
    ):
        *parts, last = chunks
        for index in (0, 1):
            usages = [chunk.usage for chunk in parts if chunk.choices[0].index == index]
            assert [usage.completion_tokens for usage in usages] == [*range(1, 21), 20]
            assert {usage.prompt_tokens for usage in usages} == {last.usage.prompt_tokens}
            assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
        assert (last.choices, last.usage.completion_tokens) == ([], 40)


def test_the_end_of_sequence_ends_an_answer(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="~", **GREEDY)
    assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("stop", "")
    more = client.completions.create(model=model, prompt="~", extra_body={"min_tokens": 3}, **GREEDY)
    assert more.usage.completion_tokens >= 3
    longest = client.completions.create(model=model, prompt="~", extra_body={"ignore_eos": True}, **GREEDY)
    assert longest.usage.completion_tokens == 20


def test_a_chat_without_a_limit_goes_on_to_its_end(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "^"}], temperature=0, stop=["never"]
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 2048


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, model: str, line: Any, stream: bool) -> None:
    whole = line(prompt=CAT, max_tokens=40).text
    stop = whole[10:13]
    expected = line(prompt=CAT, max_tokens=40, stop=stop)
    answer = client.completions.create(
        model=model, prompt=CAT, max_tokens=40, temperature=0, stop=[stop, "never"], stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == expected.text == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_seed_is_the_line_protocols(client: openai.OpenAI, model: str, line: Any) -> None:
    fields = {"max_tokens": 20, "temperature": 1.0, "top_p": 0.9, "seed": 42}
    expected = line(prompt=CAT, **fields, top_k=50).text
    extra = {"top_k": 50}
    assert client.completions.create(model=model, prompt=CAT, extra_body=extra, **fields).choices[0].text == expected
    different = {client.completions.create(model=model, prompt=CAT, max_tokens=20).choices[0].text for _ in range(3)}
    assert len(different) > 1  # without one it is drawn by lot


# ---- Several answers --------


def test_prompts_may_be_texts_and_token_ids(
    client: openai.OpenAI, model: str, line: Any, make_ids: Callable[[object, int], list[int]]
) -> None:
    texts, ids = ["the mat", CAT, "naïve café"], [make_ids(i, 5 + i) for i in range(3)]
    answer = client.completions.create(model=model, prompt=texts, **GREEDY)
    asked = [line(prompt=text, max_tokens=20) for text in texts]
    assert [(c.index, c.text) for c in answer.choices] == [(i, found.text) for i, found in enumerate(asked)]
    assert answer.usage.prompt_tokens == sum(found.end["usage"]["prompt_tokens"] for found in asked)
    assert answer.usage.completion_tokens == 60
    expected = [line(prompt_token_ids=prompt, max_tokens=20).text for prompt in ids]
    answer = client.completions.create(model=model, prompt=ids, **GREEDY)
    assert [choice.text for choice in answer.choices] == expected
    assert client.completions.create(model=model, prompt=ids[0], **GREEDY).choices[0].text == expected[0]


def test_several_streams_share_a_connection(client: openai.OpenAI, model: str, line: Any) -> None:
    prompts = ["the mat", CAT]
    texts = dict.fromkeys(range(4), "")
    ends = []
    for chunk in client.completions.create(model=model, prompt=prompts, n=2, stream=True, **GREEDY):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.finish_reason] if choice.finish_reason else []
    expected = [line(prompt=prompt, max_tokens=20).text for prompt in prompts for _ in range(2)]
    assert [texts[index] for index in range(4)] == expected
    assert ends == ["length"] * 4


def test_the_answers_to_one_prompt_differ_by_their_seeds(client: openai.OpenAI, model: str) -> None:
    fields = {"model": model, "messages": CHAT, "temperature": 1.0, "max_tokens": 20}
    answer = client.chat.completions.create(**fields, n=3, seed=5)
    alone = [client.chat.completions.create(**fields, seed=seed) for seed in (5, 6, 7)]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [single.choices[0].message.content for single in alone]
    assert len(set(texts)) == 3
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(single.usage.completion_tokens for single in alone)


# ---- Log-probabilities --------


def test_log_probabilities_of_a_completion(client: openai.OpenAI, model: str, line: Any, tiny_model: Any) -> None:
    expected = line(prompt=CAT, max_tokens=8, logprobs=3)
    answer = client.completions.create(model=model, prompt=CAT, max_tokens=8, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([token["logprobs"]["logprob"] for token in expected.tokens])
    tops = [{entry["text"]: entry["logprob"] for entry in token["logprobs"]["top"]} for token in expected.tokens]
    assert [sorted(top.values()) for top in found.top_logprobs] == [sorted(top.values()) for top in tops]
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:i]) for i in range(8)]
    bare = client.completions.create(model=model, prompt=CAT, max_tokens=8, temperature=0, logprobs=0)
    assert bare.choices[0].logprobs.token_logprobs == found.token_logprobs
    assert bare.choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat_hold_the_bytes_of_each_token(
    client: openai.OpenAI, model: str, line: Any, tiny_model: Any, stream: bool
) -> None:
    expected = line(messages=CHAT, max_tokens=30, logprobs=2)
    asked = client.chat.completions.create(
        model=model, messages=CHAT, max_tokens=30, temperature=0, logprobs=True, top_logprobs=2, stream=stream
    )
    parts = [chunk.choices[0] for chunk in asked] if stream else [asked.choices[0]]
    found = [token for part in parts if part.logprobs for token in part.logprobs.content]
    assert [token.logprob for token in found] == [token["logprobs"]["logprob"] for token in expected.tokens]
    assert all(len(token.top_logprobs) == 2 for token in found)
    together = b"".join(bytes(token.bytes) for token in found)
    assert together.decode("utf-8", "replace") == Tokenizer(tiny_model).decode(expected.ids)
    assert all(bytes(token.bytes).decode("utf-8", "replace") == token.token for token in found)


def test_a_chat_may_ask_for_the_chosen_tokens_only(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=CHAT, **GREEDY, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == 20
    assert {len(token.top_logprobs) for token in answer.choices[0].logprobs.content} == {0}


# ---- Errors --------


def test_errors_have_the_clients_own_types(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt=CAT)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=CHAT, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "^~" * 5000}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    assert "model.max_model_len 2048" in long.value.message
    with pytest.raises(openai.BadRequestError) as one_of_two:
        client.completions.create(model=model, prompt=[CAT, ""], max_tokens=1000)
    assert one_of_two.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=model, messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}], stream=True
        )
    assert tools.value.param == "tools"


def test_a_request_id_goes_in_and_out(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=CAT, max_tokens=1, extra_headers={"X-Request-Id": "mine-7"})
    assert answer._request_id == "mine-7"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt=CAT, max_tokens=0, extra_headers={"X-Request-Id": "mine-8"})
    assert bad.value.request_id == "mine-8"
    made_up = {client.completions.create(model=model, prompt=CAT, max_tokens=1)._request_id for _ in range(2)}
    assert len(made_up - {None, ""}) == 2


def test_what_is_too_much_is_refused_with_a_time(start: Any, dial: Any, wait: Any, settled: Any) -> None:
    keys = {"engine.max_batch": 1, "router.max_queue": 1, "model.max_model_len": 8192}
    with start(**keys) as cluster, client_of(cluster) as client:
        line, ids = dial(cluster.tcp), itertools.count()

        def health() -> int:
            return httpx2.get(f"http://{cluster.http}/health").status_code

        def is_full() -> bool:  # one decodes, one waits for decode, one for prefill
            line.send({"id": next(ids), "prompt": "^", "max_tokens": 8000, "ignore_eos": True})
            return health() == 503

        assert health() == 200
        wait(is_full, 5.0, "health is not told")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt=CAT)
        assert "router.max_queue" in refused.value.message
        assert (refused.value.type, refused.value.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        line.close()
        wait(lambda: health() == 200, 5.0, "health does not come back")
        settled(cluster)


def test_a_token_is_asked_for_everywhere_but_at_health(start: Any) -> None:
    with start(**{"security.token": TOKEN}) as cluster:
        with client_of(cluster, TOKEN) as client:
            model = client.models.list().data[0].id
            assert client.completions.create(model=model, prompt=CAT, max_tokens=1).choices
        for key in ("wrong", TOKEN + " x", TOKEN[:-1]):
            with client_of(cluster, key) as stranger, pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        for path in ("/v1/models", "/metrics", "/nowhere"):
            found = httpx2.get(f"http://{cluster.http}{path}")
            assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx2.get(f"http://{cluster.http}/health").status_code == 200


# ---- Leaving --------


def test_a_stream_that_is_left_is_cancelled(
    cluster: Cluster, client: openai.OpenAI, model: str, settled: Callable[[Cluster], Any]
) -> None:
    for chat in (False, True):
        if chat:
            messages = [{"role": "user", "content": "^"}]
            stream = client.chat.completions.create(
                model=model, messages=messages, max_tokens=1500, extra_body={"ignore_eos": True}, stream=True
            )
        else:
            stream = client.completions.create(model=model, stream=True, **LONG)
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
        stream.close()
        settled(cluster)


def test_a_client_that_gives_up_waiting_is_cancelled(
    cluster: Cluster, client: openai.OpenAI, model: str, settled: Callable[[Cluster], Any]
) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=model, timeout=0.3, **LONG)
    settled(cluster)


async def test_many_clients_at_once_get_what_each_gets_alone(
    cluster: Cluster, client: openai.OpenAI, model: str
) -> None:
    prompts = [f"prompt {i}" for i in range(24)]
    alone = [client.completions.create(model=model, prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
    many = openai.AsyncOpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=60.0)
    async with many:

        async def ask(prompt: str) -> str:
            stream = await many.completions.create(model=model, prompt=prompt, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(ask, prompts)) == alone
