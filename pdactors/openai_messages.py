"""What OpenAI clients ask over HTTP, as the requests that the gateway knows. Fields that change nothing are ignored;
those that would change the answer, and that we cannot honour, are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from pdactors.client_messages import RequestBody, StopString
from pdactors.errors import BadRequest
from pdactors.messages import (
    Logprobs,
    MaxTokens,
    MinTokens,
    Priority,
    Temperature,
    TokenId,
    TopK,
    TopP,
    explain,
)

MAX_ANSWERS = 128  # of one HTTP request: prompts times `n`
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
ALL_THAT_FIT = 2**20  # of a chat without a limit; the gateway knows how many that are

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction "
    "parallel_tool_calls".split()
)
REFUSED: dict[str, tuple[object, ...]] = {  # field -> the values that ask for nothing
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, each chunk has the usage of its answer so far
    include_obfuscation: bool = False  # pads chunks against eavesdroppers; ours are not padded


class OpenAIBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions have in common. The last line of fields is not OpenAI's."""

    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    top_k: TopK = 0
    min_tokens: MinTokens = 0
    ignore_eos: bool = False
    priority: Priority = "interactive"
    deadline_ms: Annotated[float, Meta(gt=0.0, le=86_400_000.0)] | None = None
    save_final_kv: bool = True

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether each chunk holds the usage of its answer."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def num_alternatives(self) -> int | None:
        """How many alternatives to report beside each token; None for no log-probabilities at all."""
        raise NotImplementedError

    def prompts(self) -> list[dict[str, Any]]:
        """Return each prompt as fields of a RequestBody; raises BadRequest."""
        raise NotImplementedError

    def limit(self) -> int:
        """Return how many tokens to generate at most."""
        raise NotImplementedError

    def requests(self, seed: int) -> list[RequestBody]:
        """Return the requests to make, `n` for each prompt; `seed` is used if the client gave none.

        The `i`-th answer to a prompt gets the seed + i, so that the first is what a request with `n` = 1 gets.

        Raises:
            BadRequest: there is no prompt, or they are too many; the message begins with the field.
        """
        first = seed if self.seed is None else self.seed
        prompts = self.prompts()
        if len(prompts) * self.n > MAX_ANSWERS:
            asked = f"{len(prompts)} prompts with n = {self.n}"
            raise BadRequest(f"{self.prompt_field}: {asked}; a request may ask for {MAX_ANSWERS} answers")
        # The engine reports log-probabilities from one alternative on; who wants none gets it cut off again.
        logprobs = 0 if self.num_alternatives is None else max(1, self.num_alternatives)
        return [
            RequestBody(
                **prompt,
                max_tokens=self.limit(),
                min_tokens=self.min_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=(first + i) % 2**63,
                stop=self.stop,
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
                priority=self.priority,
                deadline_ms=self.deadline_ms,
                save_final_kv=self.save_final_kv,
            )
            for prompt in prompts
            for i in range(self.n)
        ]


class CompletionBody(OpenAIBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`prompt` is a text, several texts, token ids, or several lists of token ids."""

    prompt_field = "prompt"

    prompt: str | tuple[str | TokenId | tuple[TokenId, ...], ...]
    logprobs: Logprobs | None = None

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    def limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[dict[str, Any]]:
        if isinstance(self.prompt, str):
            return [{"prompt": self.prompt}]
        kinds = {type(part) for part in self.prompt}
        if not kinds:
            raise BadRequest("prompt: is empty")
        if kinds == {int}:
            return [{"prompt_token_ids": self.prompt}]
        if kinds == {str}:
            return [{"prompt": text} for text in self.prompt]
        if kinds == {tuple}:
            return [{"prompt_token_ids": ids} for ids in self.prompt]
        raise BadRequest("prompt: texts, token ids and lists of token ids cannot be mixed")


class ChatBody(OpenAIBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`messages` go through the model's chat template."""

    prompt_field = "messages"

    messages: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self) -> int:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return ALL_THAT_FIT if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[dict[str, Any]]:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs: needs logprobs = true")
        return [{"messages": tuple(_plain(message, i) for i, message in enumerate(self.messages))}]


Body = TypeVar("Body", bound=OpenAIBody)


def read_body(kind: type[Body], data: bytes) -> Body:
    """Read a request's body.

    Raises:
        BadRequest: not a JSON object, or a field that is missing, unknown, out of range, or that we cannot honour.
            The message begins with its name.
    """
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
        fields = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
        wanted = {name: value for name, value in fields.items() if not _asks_nothing(name, value)}
        for name in wanted:
            if name in REFUSED:
                raise BadRequest(f"{name}: is not supported by this server")
            if name not in kind.__struct_fields__:
                raise BadRequest(f"{name}: unknown field")
        if wanted.get("top_k") == -1:  # vLLM's way to say all
            del wanted["top_k"]
        if kind.prompt_field not in wanted:
            raise BadRequest(f"{kind.prompt_field}: is needed")
        return msgspec.convert(wanted, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(explain(error)) from None


def field_of(kind: type[OpenAIBody], message: str) -> str | None:
    """Return the field that an error's message begins with; None if it is about none."""
    name, _, rest = message.partition(" ")
    name = name.rstrip(":")
    root = name.partition("[")[0].partition(".")[0]
    if rest == "unknown field" or root in REFUSED:
        return name
    if root in ("prompt", "prompt_token_ids", "messages"):
        return name.replace(root, kind.prompt_field, 1)
    return name if root in kind.__struct_fields__ else None


def _asks_nothing(name: str, value: object) -> bool:
    return any(value == neutral for neutral in REFUSED.get(name, ()))


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message as our chat takes it: the text parts of a list put together, and developers as the system.

    Raises:
        BadRequest: a part is not text.
    """
    plain = dict(message)
    if plain.get("role") == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text:
                raise BadRequest(f"messages[{index}].content[{number}]: only text parts are supported")
        plain["content"] = "".join(part["text"] for part in content)
    for name in ("tool_calls", "annotations"):  # what an answer that is sent back may hold
        if plain.get(name) == []:
            del plain[name]
    return plain
