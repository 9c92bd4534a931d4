from __future__ import annotations

import msgspec
import pytest

from pdactors.actors.decode import check_pruned
from pdactors.errors import Refused
from pdactors.kv.layout import KVLayout
from pdactors.messages import KVHandle, Lease, Segment

LAYOUT = KVLayout(2, 2, 8, 8, "float32")
SEGMENT = Segment("m", Lease(0, 1), 0, (5, 3, 9))
HANDLE = KVHandle("n0", "m", LAYOUT.fingerprint, (SEGMENT,), 20, num_pruned=10)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 21}, "21 tokens and 10 left out do not make a prompt of 30"),
        ({"num_tokens": 31, "num_pruned": -1}, "-1 left out"),
        ({"owner": "n"}, r"blocks \[\] of n for 20 tokens"),
        ({"segments": ()}, r"blocks \[\]"),
        ({"segments": (msgspec.structs.replace(SEGMENT, start=1),)}, r"blocks \[1, 2, 3\]"),
        ({"segments": (SEGMENT, SEGMENT)}, r"blocks \[0, 0, 1, 1, 2, 2\]"),
    ],
)
def test_pruned_kv_that_is_not_whole_is_refused(changes, reason):
    check_pruned(HANDLE, LAYOUT, 30)
    with pytest.raises(Refused, match=reason):
        check_pruned(msgspec.structs.replace(HANDLE, **changes), LAYOUT, 30)
