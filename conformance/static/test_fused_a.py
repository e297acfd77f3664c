"""The predicate and the config of ``fused_a``, and its operand mapping, modelled lane by lane."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.cases import table_cases
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.kernels.fused_a import PREVIOUS_FINISHED, FusedAConfig, FusedASpec, compile_unit, parse_config, resolved, token_groups, why_not

GOOD = FusedAConfig(1, 8, 1, 4)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_every_public_cell_is_servable(arch):
    cells = [case for case in table_cases(arch) if case.cell.backend == "fused_a"]
    assert cells
    for case in cells:
        problem = why_not(arch, case.n, case.k, case.m, parse_config(case.cell.config), residual=case.residual)
        assert problem is None, f"{case}: {problem}"


@pytest.mark.parametrize("k", [32, 64, 128, 160, 384, 1536, 7168])
def test_a_config_left_to_the_shape_fits_it(k):
    config = resolved(FusedAConfig(), k)
    assert why_not(SM90, 1536, k, 16, config) is None and config.k_warps * config.unroll <= k // 32
    assert compile_unit(SM90, 1536, k, 9, FusedAConfig()) == compile_unit(SM90, 8, k, 16, config)


@pytest.mark.parametrize(
    "shape, config, fragment",
    [
        ((1536, 7168, 0), GOOD, "M = 0"),
        ((1536, 7168, 9), replace(GOOD, row_tiles=4, unroll=5), "registers a thread"),
        ((1536, 7184, 1), GOOD, "multiple of 32"),
        ((0, 7168, 1), GOOD, "N = 0"),
        ((1536, 512, 1), GOOD, "has 16 blocks"),
        ((1536, 7168, 1), replace(GOOD, row_warps=8), "more than 1024 threads"),
        ((1536, 7168, 1), replace(GOOD, row_tiles=8), "registers a thread"),
        ((1536, 7168, 1), replace(GOOD, trigger=3), "trigger 3"),
    ],
)
def test_each_refusal_by_an_input_of_its_own(shape, config, fragment):
    n, k, m = shape
    assert fragment in (why_not(SM90, n, k, m, config) or "served")


def test_few_variants_serve_all_tokens():
    assert [token_groups(m) for m in (1, 8, 9, 16, 17, 64, 300)] == [1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("values", [{"row_warps": 1}, {**vars(GOOD), "tile": 1}, {**vars(GOOD), "unroll": 0}, {"trigger": 1}])
def test_bad_mappings(values):
    with pytest.raises(ValueError, match="fused_a config"):
        parse_config(values)
    assert parse_config({}) == FusedAConfig() and parse_config(vars(GOOD)) == GOOD
    late = parse_config({key: value for key, value in vars(GOOD).items() if key != "trigger"} | {"trigger": 2})
    assert late == replace(GOOD, trigger=PREVIOUS_FINISHED)


def _mma(a, b):
    """mma.m16n8k16 by the PTX ISA's fragment layout; a[lane][4], b[lane][2] words of two elements, result [lane][4]."""
    A, B = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for word, (row, k) in enumerate(((g, 2 * q), (g + 8, 2 * q), (g, 2 * q + 8), (g + 8, 2 * q + 8))):
            A[row, k : k + 2] = a[lane][word]
        for word, k in enumerate((2 * q, 2 * q + 8)):
            B[k : k + 2, g] = b[lane][word]
    D = A @ B
    return [[D[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] for i in range(4)] for lane in range(32)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("row_tiles", [1, 2, 4])
def test_the_operand_words_of_a_block_give_its_product(row_tiles, groups):
    """One block of 32 K as ``multiply_block`` hands it to the tensor core, with the rows that the kernel has a lane load
    and the places where it looks for the sums; both ways round."""
    from lowlat_gemm.kernels.fused_a_kernel import FusedAGemm

    kernel = FusedAGemm(FusedASpec(FusedAConfig(1, 1, row_tiles, 1), groups))
    lane_rows, n, m = 2 * row_tiles, 16 * row_tiles, 8 * groups
    w, x = torch.randn(n, 32, dtype=torch.float64), torch.randn(m, 32, dtype=torch.float64)
    lanes = [(lane // 4, lane % 4) for lane in range(32)]

    def words(matrix, row, quad):
        return matrix[row, quad * 8 : quad * 8 + 8].view(4, 2)

    acc = torch.zeros(32, groups * row_tiles * 4, dtype=torch.float64)
    for half in range(2):
        for index in range(groups * row_tiles):
            a, b = [], []
            for group_row, quad in lanes:
                own = [words(w, kernel.loaded_row(group_row, t), quad) for t in range(lane_rows)]
                tokens = [words(x, 8 * g + group_row, quad) for g in range(groups)]
                upper, lower = tokens if groups == 2 else own[2 * index : 2 * index + 2]
                a.append((upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1]))
                b.append((own[index] if groups == 2 else tokens[0])[2 * half : 2 * half + 2])
            acc[:, 4 * index : 4 * index + 4] += torch.tensor(_mma(a, b))
    y = torch.full((m, n), float("nan"), dtype=torch.float64)
    for lane, (group_row, quad) in enumerate(lanes):
        row = kernel.output_row(group_row, quad)
        for token, sums in kernel.lane_outputs(acc[lane], group_row, quad):
            y[token, row : row + len(sums)] = torch.stack(sums)
    assert torch.allclose(y, x @ w.T)


@pytest.mark.parametrize("k, whole", [(128, True), (256, False), (160, False)])
def test_code_for_one_k_is_made_where_a_warps_blocks_are_all_of_it(k, whole):
    assert compile_unit(SM90, 1536, k, 16, FusedAConfig(1, 1, 2, 4)).spec.whole_k is whole
