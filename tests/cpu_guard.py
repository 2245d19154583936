"""Runs the kernel tests' cases on one library with guarded arrays; a fault or a trap ends the
process.

In: a level's name as argument. Out: exit status 0 and one line per case. Next file:
``test_cpu_kernels_step.py``, which starts this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import test_cpu_kernels_attention as attention
import test_cpu_kernels_bf16 as bf16
import test_cpu_kernels_layers as layers
import test_cpu_kernels_linear as linear
import test_cpu_kernels_screen as screen
import test_cpu_kernels_split as split
from cpu_harness import INSTANCES, Kernels, has, library


def cases(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """The parameter sets of a test function's ``parametrize`` marks."""
    out: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        names = (
            [n.strip() for n in mark.args[0].split(",")]
            if isinstance(mark.args[0], str)
            else list(mark.args[0])
        )
        sets = [dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in mark.args[1]]
        out = [{**a, **b} for a in out for b in sets]
    for case in out:  # which library: here always the one at hand
        case.pop("kernels", None)
        case.pop("qkv_kernels", None)
    return [case for i, case in enumerate(out) if case not in out[:i]]


#: the kernel that a case needs, by its parameters
WANTED = {
    "test_linear_int8": "linear_int8_{fmt}",
    "test_sums_of_the_largest_codes_are_exact": "linear_int8_{fmt}",
    "test_prompts_of_several_pieces_and_tiles": "linear_int8_{fmt}",
    "test_linear_float": "linear_float_{fmt}",
    "test_embed": "embed_{fmt}",
    "test_fused_forms": "gated_{form}",
    "test_qkv_rope_cache": "{name}",
}


def main(level: str) -> None:
    kernels = Kernels(library(level), guard=True)
    tests: list[Callable[..., Any]] = [
        linear.test_linear_int8,
        linear.test_linear_float,
        linear.test_integer_dot_products_are_exact,
        linear.test_sums_of_the_largest_codes_are_exact,
        linear.test_prompts_of_several_pieces_and_tiles,
        linear.test_fused_forms,
        bf16.test_linear,
        bf16.test_fused_forms,
        screen.test_the_choice_is_that_of_all_logits,
        screen.test_numbers_that_are_none,
        split.test_all_logits,
        split.test_the_choice_is_that_of_all_logits,
        split.test_numbers_that_are_none,
        split.test_rows_of_the_table,
        layers.test_embed,
        layers.test_norms_and_quantize,
        layers.test_norms_of_widths_that_are_not_vectors,
        layers.test_quantize_of_extremes,
        layers.test_rope_table_is_right_for_large_angles,
        layers.test_rope,
        attention.test_attention,
        attention.test_attention_over_a_bf16_cache,
        attention.test_what_a_q8_0_cache_keeps,
        layers.test_qkv_rope_cache,
        layers.test_elementwise,
    ]
    if level == "ubsan-amx":
        tests = [linear.test_linear_int8, linear.test_prompts_of_several_pieces_and_tiles]
    if level == "ubsan-v3":
        tests = [
            linear.test_linear_int8,
            linear.test_integer_dot_products_are_exact,
            linear.test_sums_of_the_largest_codes_are_exact,
            linear.test_linear_float,
            linear.test_rows_do_not_depend_on_the_batch_or_the_threads,
            linear.test_prompts_of_several_pieces_and_tiles,
            bf16.test_linear,
            split.test_all_logits,
            split.test_the_choice_is_that_of_all_logits,
            attention.test_attention,
            attention.test_what_a_q8_0_cache_keeps,
            layers.test_qkv_rope_cache,
        ]
    if level == "amx":  # what goes through tiles
        tests = [linear.test_linear_int8, linear.test_fused_forms, layers.test_qkv_rope_cache]
        tests += [linear.test_prompts_of_several_pieces_and_tiles, split.test_all_logits]
    for test in tests:
        for case in cases(test):
            name = WANTED.get(test.__name__, "").format(**{"form": "", **case})
            if "exact" in case:
                form, fmt, _kind = case["exact"]
                name = "screened_bf16" if form == "bf16" else f"screened_float_{fmt}"
            if name and name in INSTANCES and not has(level, name):
                continue
            print(test.__name__, case, flush=True)
            try:
                test(kernels, **case)
            except pytest.skip.Exception:
                continue


if __name__ == "__main__":
    main(sys.argv[1])
