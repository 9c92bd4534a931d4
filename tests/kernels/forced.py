"""Run tests of the kernels in a process whose environment hides what the CPU has: `forced.py amx avx512`."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings


def main(hidden: set[str]) -> None:
    settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared")
    sys.path.append(str(Path(__file__).parents[1] / "kv"))
    import test_attention
    import test_codec
    import test_product
    import test_simd
    from conftest import KINDS

    from pdactors.kernels import cpu
    from pdactors.kv.layout import KVLayout

    assert not cpu.HAS_AMX
    assert not (cpu.HAS_AVX512 and "avx512" in hidden)
    for kind in KINDS:
        test_simd.test_a_register_is_stored_rounded_to_nearest_even(kind)
        test_simd.test_ties_are_rounded_to_even(kind)
        test_simd.test_a_pair_line_lies_as_packed_matrices_do(kind)
        test_simd.test_a_pair_lines_products_are_added(kind)
        test_simd.test_rows_as_lanes_give_the_sums_that_columns_as_lanes_give(kind)
        test_product.test_a_product_is_that_of_numpy(kind)
        test_product.test_a_row_is_the_same_whatever_is_beside_it(kind)
        test_product.test_a_gated_product_is_that_of_numpy(kind)
        test_attention.test_attention_is_that_of_numpy_and_sees_nothing_but_its_context(kind)
        test_attention.test_a_token_attends_alike_however_the_prompt_is_cut(kind)
    for codec in test_codec.CODECS:
        for dtype, head_dim in (("bfloat16", 64), ("float32", 33), ("float16", 80)):
            layout = KVLayout(2, 2, head_dim, 32, dtype)
            test_codec.check_numbers_come_back(codec, layout, seed=1, spread=0.5)
            test_codec.check_only_the_named_places_are_touched(codec, layout, seed=2)
    test_simd.test_powers_of_two_are_close()
    test_simd.test_powers_of_two_are_close_everywhere()
    test_simd.test_integers_give_exact_powers_of_two()
    test_simd.test_far_down_a_power_of_two_is_zero(-1e30)
    if "avx512" in hidden:
        assert "zmm" not in "".join(test_attention.attend.inspect_asm().values())
    print("done")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
