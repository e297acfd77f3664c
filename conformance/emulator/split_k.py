"""One GEMM by ``split_k``'s tcgen05 kernel, as it was compiled, in the emulator: operands in, y out."""

from __future__ import annotations

import struct

import numpy as np
import torch

from lowlat_gemm.kernels.split_k import shared_memory_bytes

from .cluster import Cluster, TensorMap, Trap

_Y, _RESIDUAL = 1 << 44, 1 << 45
POISON = 0x7FA5


def words(matrix: torch.Tensor) -> np.ndarray:
    return matrix.contiguous().view(torch.int16).numpy().view("<u2").copy()


def emulate(
    spec, ptx: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, seed: int
) -> torch.Tensor:
    """y [M, N] in BF16. x is poison until the previous kernel, which ends last of all, has written it.

    Raises Trap when the kernel hangs, touches what is not its own, leaves y unwritten or writes beside it.
    """
    config, (m, k), n = spec.config, x.shape, weight.shape[0]
    pitch = -(-n // 8) * 8 + 8 * (seed % 2)
    y = np.full((m, pitch), POISON, dtype="<u2")
    memory = {_Y: bytearray(y.tobytes())}
    tensors = [(_Y, pitch)]
    if residual is not None:
        padded = np.full((m, pitch), POISON, dtype="<u2")
        padded[:, :n] = words(residual)
        memory[_RESIDUAL] = bytearray(padded.tobytes())
        tensors.insert(0, (_RESIDUAL, pitch))
    tokens, late = np.full((m, k), 0x7FC0, dtype="<u2"), words(x)
    # In the kernel's order: tensor map and extents of the weight and of x, then (residual,) y, and the product's flags.
    parameters = [TensorMap(words(weight), config.rows), struct.pack("<ii", n, k)]
    parameters += [TensorMap(tokens, config.token_columns), struct.pack("<ii", m, k)]
    parameters += [struct.pack("<QiiQ", base, m, n, stride) for base, stride in tensors] + [bytes(64)]
    shared = shared_memory_bytes(config, spec.output_dtype, residual=spec.residual)
    for token_tile in range(-(-m // config.token_columns)):
        for row_tile in range(-(-n // config.rows)):
            tokens[:] = 0x7FC0
            blocks = [(row_tile * config.split + rank, token_tile) for rank in range(config.split)]
            cluster = Cluster(
                ptx, blocks, shared, dict(enumerate(parameters)), memory, seed + 1000 * row_tile + token_tile
            )
            cluster.on_previous_finished = lambda: np.copyto(tokens, late)
            cluster.run()
    got = np.frombuffer(bytes(memory[_Y]), dtype="<u2").reshape(m, pitch)
    if (got[:, n:] != POISON).any() or (got[:, :n] == POISON).any():
        raise Trap("y is written beside its rows, or not everywhere")
    return torch.from_numpy(got[:, :n].copy().view(np.int16)).view(torch.bfloat16)
