"""KDA's input projections at TP 8 on two streams: QKVG on the caller's, F_A / beta and then F_B beside it. Needs torch.

    main   ── start ──── QKVG ──────────── wait done ──
    aux    └─ wait start ── F_A/beta ── F_B ── done ─┘

Memory. Whatever is launched between the fork and the join belongs to the main stream as far as the allocator can see:
outputs are allocated there before the fork, and are held until the join is in the stream. A block that was used before
is written on the aux stream only after ``start``, behind its last use; a block that is freed afterwards is given away
only to work behind ``done``. So nothing needs ``record_stream``, which would keep memory of a graph from being used
again, and this holds in eager mode as in a capture. The join is in the stream also when a launch raises: a capture
never ends with work that was not joined.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from . import execute
from . import settings as settings_module
from .arch import arch_of_device, device_properties
from .dispatch import disabled_refusal
from .execute import NotCompiledError, kernels_of, launch
from .kda_branches import GEOMETRY, Branches, branches, overlap_table, overlap_units
from .kernels.registry import layout_refusal, on_device
from .operands import Reason, Refusal, check_operands, check_weight
from .settings import Settings
from .tables import MAX_OVERLAP_TOKENS, TableError
from .torch_op import storage_of

_DTYPE = torch.bfloat16


def kda_overlap_limit(ordinal: int) -> int | Refusal:
    """The largest M for which the overlap is the better path on CUDA device ``ordinal``, from 0; or why none is known.

    It is that of the table of the device's generation (``[kda_overlap]``). Refused in batch-invariant mode, since the
    branches' kernels differ over M, and by the switches that refuse every plan.
    """
    return disabled_refusal() or _limit(ordinal, settings_module.current())


@functools.lru_cache(maxsize=64)
def _limit(ordinal: int, settings: Settings) -> int | Refusal:
    device, arch = device_properties(ordinal), arch_of_device(ordinal)
    if arch is None:
        return Refusal(Reason.CAPABILITY, str(device))
    try:
        table = overlap_table(arch)
    except TableError as error:
        return Refusal(Reason.TABLE, str(error))
    mismatch = None if settings.any_device else table.device.mismatch(device)
    if mismatch is not None:
        return Refusal(Reason.DEVICE_CLASS, f"{mismatch} (LOWLAT_GEMM_ANY_DEVICE=1 uses it)")
    if settings.batch_invariant:
        return Refusal(Reason.BATCH_INVARIANT, "the branches' kernels do not add in one order at every M")
    section = table.kda_overlap
    if section is None or section.limit is None:
        return Refusal(Reason.TOKENS, f"nobody has measured for {arch} up to which M the KDA overlap is faster")
    return section.limit.max_tokens


def run_kda_projection_overlap(hidden_states, packed_weight, f_b_weight, aux_stream, events, *, max_tokens=None):
    """(qkvg [M, 6144], g1 [M, 1536], beta [M, 12]) of KDA's input projections at TP 8, on two streams at once.

    hidden_states: [M, 7168], rows of unit stride and a pitch of whole 16-byte words. packed_weight: [6288, 7168], rows
    Q, K, V, G (4 x 1536), F_A (128), beta (12) and 4 of padding; f_b_weight: [1536, 128]; both packed. All BF16 on one
    CUDA device. qkvg = x @ packed_weight[:6144].T; g1 = (x @ F_A.T) @ f_b_weight.T, with F_A's part rounded to BF16
    between; beta = x @ beta.T, a view with rows 144 apart.

    The caller's stream is the current one of that device; it forks to ``aux_stream``, another stream of the device, by
    the first of two ``events`` and is joined by the second. Both can be used again at once, in the same capture too.
    Outputs belong to the caller's stream. Made for CUDA graph capture; right in eager mode as well.

    ``max_tokens``: the largest M to run, 1 to 16, instead of the limit of the table (``kda_overlap_limit``), where
    nobody has measured one or in a measurement. Compile before capture: ``autotune_kda_qkvg``, or a call in eager mode.

    ValueError, naming what was found: other shapes, dtypes, strides or devices; an M above the limit, or no limit; a
    tensor that needs a gradient; a stream that is the current one or of another device; other than two events.
    NotCompiledError in a capture that would have to compile, and in strict mode outside of one.
    """
    x, packed, f_b = map(storage_of, (hidden_states, packed_weight, f_b_weight))
    _check(x, packed, f_b)
    _check_streams(x, aux_stream, events)
    m, ordinal = x.shape[0], x.device.index
    _check_tokens(m, ordinal, max_tokens)
    chosen = branches(arch_of_device(ordinal), m).on(ordinal)
    if chosen.qkvg is not None and layout_refusal(chosen.qkvg, x, packed) is not None:
        chosen = replace(chosen, qkvg=None)
    qkvg_kernel, fa_beta_kernel, f_b_kernel = _kernels(chosen)
    qkvg, fa_beta, g1 = (
        torch.empty((m, n), dtype=x.dtype, device=x.device) for n in (GEOMETRY.qkvg, GEOMETRY.fa_beta, GEOMETRY.f_b)
    )
    start, done = events
    main = torch.cuda.current_stream(x.device)
    start.record(main)
    aux_stream.wait_event(start)
    try:
        with torch.cuda.stream(aux_stream):
            _product(fa_beta_kernel, x, packed[GEOMETRY.qkvg :], fa_beta)
            _product(f_b_kernel, fa_beta[:, : GEOMETRY.f_a], f_b, g1)
        _product(qkvg_kernel, x, packed[: GEOMETRY.qkvg], qkvg)
    finally:
        done.record(aux_stream)
        main.wait_event(done)
    return qkvg, g1, fa_beta[:, GEOMETRY.f_a : GEOMETRY.f_a + GEOMETRY.beta]


def _product(kernel, x, weight, y) -> None:
    """y = x @ weight.T on the current stream; ``kernel`` None: torch's own."""
    if kernel is None:
        torch.mm(x, weight.T, out=y)
    else:
        launch(kernel, x, weight, None, y)


def _kernels(chosen: Branches) -> list:
    """The compiled kernel of each branch, or None for torch's own GEMM. NotCompiledError if one is late and strict."""
    units = chosen.units()
    late = [unit for unit in units if execute.COMPILE_CACHE.peek(unit) is None]
    strict = settings_module.current().strict
    if strict or not torch.cuda.is_current_stream_capturing():  # in a capture ``kernels_of`` counts them
        execute.COMPILE_CACHE.late += len(late)
    if late and strict:
        raise NotCompiledError(f"{late[0].kernel} of the KDA overlap was not compiled before: autotune_kda_qkvg does")
    by_unit = dict(zip(units, kernels_of(units)))
    return [by_unit.get(unit) for unit in (chosen.qkvg, chosen.fa_beta, chosen.f_b)]


def _check(x, packed, f_b) -> None:
    wanted = {
        "hidden_states": (x, (x.shape[0] if x.dim() else 0, GEOMETRY.hidden)),
        "packed_weight": (packed, (GEOMETRY.packed, GEOMETRY.hidden)),
        "f_b_weight": (f_b, (GEOMETRY.f_b, GEOMETRY.f_a)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != _DTYPE:
            raise ValueError(f"expected {name} {list(shape)} of {_DTYPE}, found {list(tensor.shape)} of {tensor.dtype}")
        if tensor.device.type != "cuda" or tensor.device != x.device:
            raise ValueError(f"expected {name} on the CUDA device of hidden_states ({x.device}), found {tensor.device}")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{name} needs a gradient: call under torch.inference_mode() or torch.no_grad()")
    refusal = check_operands(x, packed) or check_weight(f_b, name="f_b_weight")
    if refusal is not None:
        raise ValueError(str(refusal))


def _check_streams(x, aux_stream, events) -> None:
    if len(events) != 2:
        raise ValueError(f"expected two events, for fork and join, found {len(events)}")
    if aux_stream.device != x.device:
        raise ValueError(f"expected an aux_stream of {x.device}, found one of {aux_stream.device}")
    if aux_stream == torch.cuda.current_stream(x.device):
        raise ValueError("aux_stream is the current stream: nothing would overlap")


def _check_tokens(m: int, ordinal: int, max_tokens: int | None) -> None:
    if max_tokens is not None:
        _check_forced(max_tokens)
    limit = kda_overlap_limit(ordinal) if max_tokens is None else max_tokens
    if isinstance(limit, Refusal):
        forced = f"max_tokens = 1 to {MAX_OVERLAP_TOKENS} runs it all the same"
        raise ValueError(f"no limit for the KDA overlap: {limit}; {forced}")
    if limit == 0:
        raise ValueError("the KDA overlap never wins here")
    if not 1 <= m <= limit:
        raise ValueError(f"{m} tokens: the KDA overlap serves 1 to {limit} here")


def _check_forced(max_tokens: int) -> None:
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_OVERLAP_TOKENS:
        raise ValueError(f"expected max_tokens of 1 to {MAX_OVERLAP_TOKENS}, found {max_tokens!r}")


def autotune_kda_qkvg(model: torch.nn.Module, *, max_tokens: int | None = None) -> dict[str, int]:
    """Makes everything ready that ``run_kda_projection_overlap`` launches for ``model``'s KDA layers; returns, by the
    name of each such module, the largest M for which it may be called (0: not at all). To be called before capture.

    A KDA layer is a module whose ``in_proj_qkvgfab.weight`` and ``f_b_proj.weight`` are BF16 weights of TP 8 on CUDA,
    as the function takes them. Kernels compile or load here, and torch's own GEMM, where a branch runs that, sets
    itself up. Nothing is timed: what a branch runs is what the tables say. ``max_tokens``: instead of the table's
    limit. CompileError where a kernel does not compile; NotCompiledError in a capture.
    """
    if max_tokens is not None:
        _check_forced(max_tokens)
    ready, done = {}, set()
    for name, module in model.named_modules():
        weights = _layer_weights(module)
        if weights is None:
            continue
        ordinal = weights[0].device.index
        limit = kda_overlap_limit(ordinal) if max_tokens is None else max_tokens
        ready[name] = 0 if isinstance(limit, Refusal) else limit
        if ordinal not in done and ready[name]:
            done.add(ordinal)
            _prepare(ordinal, ready[name], *weights)
    return ready


def _layer_weights(module):
    """The packed weight and F_B's of a KDA layer at TP 8, or None for any other module."""
    found = [getattr(getattr(module, name, None), "weight", None) for name in ("in_proj_qkvgfab", "f_b_proj")]
    if not all(isinstance(weight, torch.Tensor) for weight in found):
        return None
    packed, f_b = map(storage_of, found)
    shapes = (GEOMETRY.packed, GEOMETRY.hidden), (GEOMETRY.f_b, GEOMETRY.f_a)
    for weight, shape in zip((packed, f_b), shapes):
        if tuple(weight.shape) != shape or weight.dtype != _DTYPE or weight.device.type != "cuda":
            return None
        if check_weight(weight) is not None:
            return None
    return packed, f_b


def _prepare(ordinal: int, most: int, packed, f_b) -> None:
    """Kernels for every M, and one call of torch's GEMM for each shape and M that runs it."""
    arch = arch_of_device(ordinal)
    with torch.cuda.device(ordinal), torch.no_grad():
        kernels_of([on_device(unit, ordinal) for unit in overlap_units(arch, most)])
        x = torch.empty((most, GEOMETRY.hidden), dtype=_DTYPE, device=packed.device)
        y = torch.empty((most, GEOMETRY.qkvg), dtype=_DTYPE, device=packed.device)
        for m in range(1, most + 1):
            chosen = branches(arch, m).on(ordinal)
            for unit, weight in (
                (chosen.qkvg, packed[: GEOMETRY.qkvg]), (chosen.fa_beta, packed[GEOMETRY.qkvg :]), (chosen.f_b, f_b),
            ):  # fmt: skip
                if unit is None:
                    _product(None, x[:m, : weight.shape[1]], weight, y[:m, : weight.shape[0]])
