from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pdactors.kv.layout import KVLayout

SMOL = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=32, dtype="bfloat16")


def test_sizes_follow_from_the_shape() -> None:
    assert SMOL.itemsize == 2
    assert SMOL.shape == (30, 2, 3, 32 * 64)
    assert SMOL.token_bytes == 30 * 2 * 3 * 64 * 2 == 23_040
    assert SMOL.block_bytes == 32 * 23_040
    assert dataclasses.replace(SMOL, dtype="float32").block_bytes == 2 * SMOL.block_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_num_blocks_rounds_up(tokens: int, blocks: int) -> None:
    assert SMOL.num_blocks(tokens) == blocks


def test_fingerprint_is_known_and_stable() -> None:
    assert SMOL.fingerprint == "dce1bd5f9462ea4b"


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 31}, {"num_kv_heads": 4}, {"head_dim": 65}, {"block_tokens": 16}, {"dtype": "float16"}],
    ids=lambda change: next(iter(change)),
)
def test_every_field_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert dataclasses.replace(SMOL, **change).fingerprint != SMOL.fingerprint


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_tokens"])
def test_a_field_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        dataclasses.replace(SMOL, **{name: 0})


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'int8'"):
        KVLayout(1, 1, 1, 1, "int8")  # type: ignore[arg-type]
