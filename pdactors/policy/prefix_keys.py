"""`PrefixKeys`: by which digests the KV of a prompt's beginnings can be found. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdactors.kv.prefix import Part, chain, parts


class PrefixKeys:
    """Digests of the full blocks of a prompt, and of parts of the block after them. One token is left to compute."""

    def __init__(self, prompt: Sequence[int], block_tokens: int, key: bytes) -> None:
        self._prompt = prompt
        self._useful = prompt[: len(prompt) - 1]
        self._key = key
        self._parts: dict[int, list[Part]] = {}
        self.block_tokens = block_tokens
        self.digests = tuple(chain(self._useful, block_tokens, key))

    def full(self) -> tuple[bytes, ...]:
        """Return the digests of all full blocks, also of one that the prompt ends with: it is of use to longer ones."""
        begin = len(self.digests) * self.block_tokens
        parent = self.digests[-1] if self.digests else None
        return (*self.digests, *chain(self._prompt[begin:], self.block_tokens, self._key, parent))

    def chain(self, num_tokens: int) -> tuple[bytes, ...]:
        """Return the digests of the blocks that hold the first tokens; the last may be that of a part."""
        full, rest = divmod(num_tokens, self.block_tokens)
        part = [part.digest for part in self.parts(full) if part.num_tokens == rest]
        return (*self.digests[:full], *part)

    def parts(self, num_blocks: int) -> list[Part]:
        """Return the parts of the block after the first `num_blocks`, longest first."""
        if num_blocks not in self._parts:
            begin = num_blocks * self.block_tokens
            parent = self.digests[num_blocks - 1] if num_blocks else None
            tokens = self._useful[begin : begin + self.block_tokens]
            self._parts[num_blocks] = parts(tokens, self.block_tokens, self._key, parent)
        return self._parts[num_blocks]
