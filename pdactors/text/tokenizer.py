"""Text to token ids and back, chat templates included. Owns the tokenizer of one model folder; knows no requests.

Special tokens (`<|im_end|>` and its like) written in a message of a chat are encoded as the plain text that they are,
so a message cannot forge a turn; in a plain prompt they count as special tokens, because the prompt is taken as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pdactors.errors import BadRequest, ModelError
from pdactors.text.template import ChatTemplate

ROLES = ("system", "user", "assistant", "tool")

# A special token in a message travels through the template as OPEN + its index + CLOSE (private use characters).
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a folder in Hugging Face format.

    Raises:
        ModelError: tokenizer.json or the chat template is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        description = _read_json(folder / "tokenizer.json")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.decoder: Mapping[str, Any] = description.get("decoder") or {}
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._specials = tuple(sorted((added[i].content for i in self.special_ids), key=len, reverse=True))
        config = _read_json(folder / "tokenizer_config.json", optional=True)
        self._named = _named_tokens(config, _read_json(folder / "special_tokens_map.json", optional=True))
        bos = self._named.get("bos_token") if config.get("add_bos_token") else None
        self._bos_id = None if bos is None else self._backend.token_to_id(bos)
        source = _template_source(folder, config)
        self._template = None if source is None else ChatTemplate(source, f"the chat template of {folder}")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Encode `text`, with the special tokens that this model puts around a prompt. Raises BadRequest."""
        ids = _ids(self._backend, text, add_special_tokens=True)
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode a conversation through the model's chat template, up to where the assistant's answer begins.

        Raises:
            BadRequest: a message is malformed (the text names it), the template refuses the conversation, or the
                model has no template.
        """
        checked = _check_messages(messages)
        if self._template is None:
            raise BadRequest(f"{self._folder.name} has no chat template; send `prompt`, which goes in as it is")
        marks = self._marks_for(checked)
        if not marks:
            text = self._template.render(checked, self._named)
            return _ids(self._backend, text, add_special_tokens=False)
        index = {mark: number for number, mark in enumerate(marks)}
        pattern = re.compile("|".join(map(re.escape, marks)))
        for message in checked:
            for key, text in message.items():
                message[key] = pattern.sub(lambda found: f"{_OPEN}{index[found[0]]}{_CLOSE}", text)
        return self._encode_marked(self._template.render(checked, self._named), marks)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode without special tokens; ids outside the vocabulary give no text."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id; None where the id is unused."""
        return self._backend.id_to_token(token_id)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of `<0x00>` … `<0xFF>`, as far as the vocabulary has them."""
        ids = (self._backend.token_to_id(f"<0x{value:02X}>") for value in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    def _marks_for(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
        """What has to be marked in these messages: nothing, or every special token and the marks themselves."""
        texts = [text for message in messages for text in message.values()]
        if any(special in text for text in texts for special in self._specials):
            return (*self._specials, _OPEN, _CLOSE)
        return ()

    def _encode_marked(self, text: str, marks: Sequence[str]) -> list[int]:
        pieces = _MARK.split(text)  # [text, index, text, index, ..., text]
        ids = _ids(self._backend, pieces[0], add_special_tokens=False)
        for number, piece in enumerate(pieces[1:], start=1):
            if number % 2:
                ids += _ids_after_newline(self._literal_backend, marks[int(piece)])
            elif piece:
                ids += _ids_after_newline(self._backend, piece)
        return ids

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer, with special tokens taken as plain text."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error
    # Not `encode`, which keeps other threads from running, for a second where a text has a megabyte.
    return list(backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)


def _ids_after_newline(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Encode text from the middle of a prompt: a SentencePiece-like tokenizer puts a space before a beginning."""
    newline = _ids(backend, "\n", add_special_tokens=False)
    ids = _ids(backend, "\n" + text, add_special_tokens=False)
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return _ids(backend, text, add_special_tokens=False)


def _check_messages(messages: Any) -> list[dict[str, str]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise BadRequest(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise BadRequest("messages must not be empty")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} must be an object, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        found = f"{role[:60]!r}" if isinstance(role, str) else type(role).__name__
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}, not {found}")
    checked = {"role": str(role)}
    for key in ("content", "name"):
        value = message.get(key)
        if isinstance(value, str):
            checked[key] = value
        elif value is not None or key == "content":
            raise BadRequest(f"{where}.{key} must be a string, not {type(value).__name__}")
    for key, value in message.items():
        if value is not None and key not in ("role", "content", "name"):
            raise BadRequest(f"{where}.{key:.60} is not supported; a message has role, content and name")
    return checked


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        hint = "save it with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        raise ModelError(f"{path.parent} has no {path.name}; {hint}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def _named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on, as a template sees them; an earlier file wins."""
    named: dict[str, str] = {}
    for config in configs:
        for key in _NAMED_TOKENS:
            value = config.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named.setdefault(key, content)
    return named


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: chat_template.jinja if it is there, else what tokenizer_config.json holds."""
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        source = config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'chat_template.jinja'} cannot be read: {error}") from error
    if isinstance(source, list):  # several, by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string")
    return source
