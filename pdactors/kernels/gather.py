"""Packs chosen tokens of a sequence's blocks into fewer blocks, each layer and KV head its own."""

from __future__ import annotations

from numba import njit


@njit(nogil=True, cache=True)
def gather(source, blocks, kept, block_elements, head_dim, block_tokens, target, rows):
    """Copy K and V of tokens `kept`, int64 `[layers, kv_heads, count]`, to slots 0 .. count.

    Token t of the sequence is in slot `t % block_tokens` of block `blocks[t // block_tokens]` of the flat `source`; the
    slots are those of blocks `rows` of the flat `target`, which may be the same array. Both hold unsigned integers of
    the elements' size. Nothing is checked.
    """
    layers, kv_heads, count = kept.shape
    plane = head_dim * block_tokens
    for layer in range(layers):
        for head in range(kv_heads):
            keys = (2 * layer * kv_heads + head) * plane
            values = keys + kv_heads * plane
            for i in range(count):
                token = kept[layer, head, i]
                begin = blocks[token // block_tokens] * block_elements
                to = rows[i // block_tokens] * block_elements
                slot, to_slot = token % block_tokens, i % block_tokens
                for d in range(head_dim):
                    key, value = keys + d, values + d * block_tokens
                    target[to + key + to_slot * head_dim] = source[begin + key + slot * head_dim]
                    target[to + value + to_slot] = source[begin + value + slot]
