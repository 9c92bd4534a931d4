from __future__ import annotations

import pytest

from pdactors.kv.prefix import chain, parts
from pdactors.policy.prefix_keys import PrefixKeys

KEY = b"key"


@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_one_token_is_left_to_compute_but_all_full_blocks_are_of_use_to_others(num_tokens):
    prompt = list(range(num_tokens))
    keys = PrefixKeys(prompt, 4, KEY)
    assert list(keys.full()) == chain(prompt, 4, KEY)
    assert list(keys.digests) == chain(prompt[:-1], 4, KEY)


def test_a_beginning_may_end_inside_a_block():
    prompt = list(range(12))
    keys, digests = PrefixKeys(prompt, 4, KEY), chain(prompt, 4, KEY)
    (part,) = [part.digest for part in parts(prompt[4:7], 4, KEY, digests[0]) if part.num_tokens == 3]
    assert keys.chain(4) == (digests[0],)
    assert keys.chain(7) == (digests[0], part)
    assert keys.chain(0) == ()
