"""What the last tokens of a prompt attend to, summed for each layer and KV head: which tokens are heavy hitters."""

from __future__ import annotations

import torch


def attention_mass(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Add up the attention that queries pay to each token, over all of them and over the heads that share a KV head.

    `queries` are `[kv_heads, heads_per_kv_head, n, head_dim]`, those of the last n tokens; `keys` `[kv_heads, tokens,
    head_dim]`. A token sees up to itself. Returns float32 `[kv_heads, tokens]`; each KV head's adds up to
    `heads_per_kv_head * n`.
    """
    kv_heads, group, count, head_dim = queries.shape
    num_tokens = keys.shape[1]
    rows = queries.reshape(kv_heads, group * count, head_dim).float()
    scores = (rows @ keys.float().transpose(1, 2)).mul_(scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(num_tokens - count, num_tokens)[:, None]
    hidden = torch.arange(num_tokens) > position
    scores.view(kv_heads, group, count, num_tokens).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1).sum(1)
