"""Which weights captured CUDA graphs read, and whether those still lie where they were. Needs torch.

A graph holds the address that a weight had at the capture. A weight that is written in place is read as it is; one that
got other storage is not: the graph goes on reading the old one, freed or not. Nothing of a replay passes through here,
so whoever owns a weight notes its place at each captured launch, and can be asked afterwards.

A place is the storage itself, by a weak reference, with the view of it: an address alone says nothing, for the
allocator gives it out again.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class WeightPlace:
    """Where a weight lies. It keeps nothing alive."""

    def __init__(self, weight):
        self._storage = StorageWeakRef(weight.untyped_storage())
        self._view = _view(weight)

    def is_of(self, weight) -> bool:
        """Whether ``weight`` is the same view of the same storage."""
        # A weak reference keeps the storage's own object, if not its memory: no other one has its identity meanwhile.
        return self._view == _view(weight) and self._storage.cdata == weight.untyped_storage()._cdata


def _view(weight) -> tuple:
    # The address too: a storage can be given other memory (``Tensor.set_``, ``resize_``).
    return weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype, weight.device


class Captures:
    """What an owner of a weight knows of the graphs over it: one place, and whether there was ever another."""

    def __init__(self) -> None:
        self._place: WeightPlace | None = None
        self._several = False

    def note(self, weight) -> None:
        """To be called at each launch; counts where the current stream is being captured."""
        if not torch.cuda.is_current_stream_capturing():
            return
        if self._place is None:
            self._place = WeightPlace(weight)
        elif not self._place.is_of(weight):
            self._several = True

    def stale(self, weight) -> bool:
        """Whether some graph that was captured reads another place than that of ``weight``."""
        return self._several or (self._place is not None and not self._place.is_of(weight))

    def forget(self) -> None:
        """To be called when the graphs are gone, before others are captured."""
        self._place, self._several = None, False


#: Of modules, which are copied and pickled and must not carry this with them.
_OF_MODULES: weakref.WeakKeyDictionary[torch.nn.Module, Captures] = weakref.WeakKeyDictionary()


#: Modules whose weights operators are given, which see no module: how those find theirs.
_INSTALLED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
#: View of a weight -> the module that had it there when somebody looked last. Looked up, then compared.
_AT: dict[tuple, weakref.ref[torch.nn.Module]] = {}


def note_capture(module: torch.nn.Module, weight) -> None:
    """``Captures.note`` for a module that launched with its ``weight``."""
    if torch.cuda.is_current_stream_capturing():
        _OF_MODULES.setdefault(module, Captures()).note(weight)


def watch(module: torch.nn.Module) -> None:
    """To be called where a compiler may put an operator in place of a module: its captures are then the module's."""
    _INSTALLED.add(module)


def note_operator(weight) -> None:
    """``note_capture`` for an operator: of the installed module whose weight it was given, if there is one."""
    if not torch.cuda.is_current_stream_capturing():
        return
    module = _owner(weight)
    if module is None:
        _AT.clear()
        _AT.update((_view(one.weight), weakref.ref(one)) for one in _INSTALLED if _has_weight(one))
        module = _owner(weight)
    if module is not None:
        note_capture(module, module.weight)


def _owner(weight) -> torch.nn.Module | None:
    found = _AT.get(_view(weight))
    module = None if found is None else found()
    return module if module is not None and _has_weight(module) and WeightPlace(weight).is_of(module.weight) else None


def _has_weight(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor)


def is_stale(module: torch.nn.Module) -> bool:
    """Whether a graph that was captured through ``module`` reads another weight than it has now."""
    captures = _OF_MODULES.get(module)
    return captures is not None and (not _has_weight(module) or captures.stale(module.weight))


def stale_weights(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the modules below ``model`` whose weight lies elsewhere than captured graphs read it.

    Such a graph computes with the old weight, or with whatever is in its memory by now: it has to be captured again. A
    weight that was written in place is not stale. Known are launches of our kernels through modules that
    ``enable_low_latency_gemm`` or an adapter took, those of the operator that stands for such a module in compiled code
    among them.
    """
    return tuple(name for name, module in model.named_modules() if is_stale(module))


def forget_captures(model: torch.nn.Module) -> None:
    """Says that the graphs through the modules below ``model`` are gone; those captured from now on count."""
    for module in model.modules():
        _OF_MODULES.pop(module, None)
