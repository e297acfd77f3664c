"""``split_k`` in company: on two streams at once, and clusters that find few SMs free."""

from __future__ import annotations

import pytest
import torch

from conformance.gpu.occupier import compiled_occupier
from conformance.harness import operands
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels.split_k import SplitKConfig, compile_unit

N, K, M = 1536, 7168, 16
CONFIGS = [SplitKConfig(56, 16, 4, 11), SplitKConfig(64, 16, 8, 8), SplitKConfig(80, 16, 2, 4, k_blocks=2)]
LAUNCHES = 2000
OCCUPIED_NS = 20_000_000


def _kernel(arch, config):
    return COMPILE_CACHE.get(compile_unit(arch, N, K, M, config))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.split))
def test_two_streams_at_once(arch, config):
    """The same kernel and another one on two streams, without a word between them: every result as alone."""
    mine, other = _kernel(arch, config), _kernel(arch, CONFIGS[0])
    data = operands(N, K, "random", tokens=32)
    expected = [launch(mine, data.x[:M], data.weight), launch(other, data.x[M:], data.weight)]
    torch.cuda.synchronize()
    streams, kernels = [torch.cuda.Stream(), torch.cuda.Stream()], [mine, other]
    inputs, outputs = [data.x[:M], data.x[M:]], [torch.empty_like(one) for one in expected]
    different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for i in range(LAUNCHES):
        for side in range(2):
            with torch.cuda.stream(streams[side]):
                launch(kernels[side], inputs[side], data.weight, None, outputs[side])
                if i % 100 == 99:
                    different[side] += (outputs[side] != expected[side]).sum()
                    outputs[side].fill_(float("nan"))
    torch.cuda.synchronize()
    assert [int(one) for one in different] == [0, 0], f"{config}: elements differ: {[int(one) for one in different]}"


@pytest.mark.parametrize("free", [0, 1, 6])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.split))
def test_few_sms_are_free(arch, config, free):
    """All SMs but ``free`` are taken for 20 ms: clusters that do not fit wait, and every result is right in the end."""
    compiled = _kernel(arch, config)
    data = operands(N, K, "random", tokens=32)
    wanted = launch(compiled, data.x[:M], data.weight)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    occupy, spans = compiled_occupier(arch.compile_target), torch.zeros(sms, 2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    crowd, side = torch.cuda.Stream(), torch.cuda.Stream()
    occupy(spans, sms - free, OCCUPIED_NS, crowd.cuda_stream)
    with torch.cuda.stream(side):
        results = [launch(compiled, data.x[:M], data.weight) for _ in range(20)]
    crowd.synchronize()
    side.synchronize()
    began, ended = spans[: sms - free].unbind(1)
    assert int(began.max()) < int(ended.min()), "the occupiers were not all there at once: they do not keep as many SMs busy"
    for i, y in enumerate(results):
        assert torch.equal(y, wanted), f"{config}, {free} SMs free, launch {i}: {int((y != wanted).sum())} elements differ"
