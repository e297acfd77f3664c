"""One GEMM by a kernel of the KDA pair, as it was compiled, in the emulator."""

from __future__ import annotations

import struct

import numpy as np
import torch

from lowlat_gemm.kernels.kda import shared_memory_bytes

from .cluster import Cluster, Trap
from .split_k import POISON, words

_X, _WEIGHT, _Y = 1 << 44, 1 << 45, 1 << 46


def emulate(spec, ptx: str, x: torch.Tensor, weight: torch.Tensor, seed: int) -> torch.Tensor:
    """y [M, N] in BF16, from rows of x that are 144 elements apart where they are shorter. As ``split_k.emulate``."""
    (m, k), n = x.shape, weight.shape[0]
    pitch = max(k, 144)
    tokens = np.full((m, pitch), 0x7FC0, dtype="<u2")
    tokens[:, :k] = words(x)
    memory = {
        _X: bytearray(b"\xc0\x7f" * tokens.size),
        _WEIGHT: bytearray(words(weight).tobytes()),
        _Y: bytearray(np.full((m, n), POISON, dtype="<u2").tobytes()),
    }
    parameters = [struct.pack("<QQ", _X, pitch), struct.pack("<QQQ", _WEIGHT, n, k), struct.pack("<QQQ", _Y, n, n)]
    for tile in range(-(-n // spec.config.rows)):
        memory[_X][:] = b"\xc0\x7f" * tokens.size
        shared = shared_memory_bytes(spec.config, spec.tokens)
        cluster = Cluster(ptx, [(tile, 0)], shared, dict(enumerate(parameters)), memory, seed + tile)
        cluster.on_previous_finished = lambda: memory[_X].__setitem__(slice(None), tokens.tobytes())
        cluster.run()
    y = np.frombuffer(bytes(memory[_Y]), dtype="<u2").reshape(m, n)
    if (y == POISON).any():
        raise Trap("y is not written everywhere")
    return torch.from_numpy(y.copy().view(np.int16)).view(torch.bfloat16)
