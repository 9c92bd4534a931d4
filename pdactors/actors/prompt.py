"""From a client's request to the token ids of its prompt."""

from __future__ import annotations

from pdactors.client_messages import RequestBody
from pdactors.errors import BadRequest
from pdactors.text.tokenizer import Tokenizer


def tokenise(tokenizer: Tokenizer, body: RequestBody, vocab_size: int) -> tuple[int, ...]:
    """Return the prompt's token ids.

    Raises:
        BadRequest: not exactly one kind of prompt, an empty one, or ids outside the vocabulary.
    """
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        found = f"got {', '.join(given)}" if given else "got none"
        raise BadRequest(f"exactly one of prompt, messages and prompt_token_ids is needed, {found}")
    if body.messages is not None:
        ids = tokenizer.encode_chat(body.messages)
    elif body.prompt is not None:
        ids = tokenizer.encode(body.prompt) if body.prompt else []
    else:
        ids = list(body.prompt_token_ids or ())
    if not ids:
        raise BadRequest(f"{given[0]}: is empty; at least one token is needed")
    if max(ids) >= vocab_size:
        raise BadRequest(f"{given[0]}: token id {max(ids)} is outside the vocabulary of {vocab_size}")
    return tuple(ids)
