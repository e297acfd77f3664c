"""CUDA graphs of launches: capturing them, taking programmatic dependent launch out of one, and naming its kernels.

PDL is a property of the edge between two kernel nodes of a graph. A graph "without PDL" is the captured one with each
programmatic edge replaced by a full one: the same kernels, and no node more. What a kernel would do before its
predecessor ends, it then does after; its ``griddepcontrol.wait`` returns at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch


def capture(calls: Iterable[Callable[[], object]], *, pdl: bool = True) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` in their order, ready to replay. Raises RuntimeError when the driver refuses a step."""
    graph = torch.cuda.CUDAGraph() if pdl else torch.cuda.CUDAGraph(keep_graph=True)
    _record(graph, calls)
    if not pdl:
        cut_programmatic_edges(graph.raw_cuda_graph())
        graph.instantiate()
    return graph


def _record(graph: torch.cuda.CUDAGraph, calls: Iterable[Callable[[], object]]) -> None:
    """What ``torch.cuda.graph`` does, without giving the allocator's free memory back to the driver before: a tuning run
    captures thousands of graphs, and would ask for it again after each."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # a graph of an earlier job that is collected now would be refused its end
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


def cut_programmatic_edges(raw_graph: int) -> int:
    """Makes each programmatic edge of a graph that is not instantiated a full one; returns how many there were."""
    from cuda.bindings import driver

    graph = driver.CUgraph(raw_graph)
    *_, count = _checked(driver.cuGraphGetEdges(graph))
    origins, targets, data, _ = _checked(driver.cuGraphGetEdges(graph, count))
    programmatic = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    found = [edge for edge in zip(origins, targets, data) if int(edge[2].type) == int(programmatic)]
    if found:
        origins, targets, data = map(list, zip(*found))
        _checked(driver.cuGraphRemoveDependencies(graph, origins, targets, data, len(found)))
        full = [driver.CUgraphEdgeData() for _ in found]
        _checked(driver.cuGraphAddDependencies(graph, origins, targets, full, len(found)))
    return len(found)


def kernel_names(call: Callable[[], object]) -> list[str]:
    """What one ``call`` launches, in its order, as the driver names it: kernels, and other nodes by their kind."""
    from cuda.bindings import driver

    recorded = torch.cuda.CUDAGraph(keep_graph=True)
    _record(recorded, [call])
    graph = driver.CUgraph(recorded.raw_cuda_graph())
    *_, count = _checked(driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count))
    names = []
    for node in nodes:
        (kind,) = _checked(driver.cuGraphNodeGetType(node))
        if int(kind) != int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL):
            names.append(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower())
            continue
        (launch,) = _checked(driver.cuGraphKernelNodeGetParams(node))
        # A kernel is given by one of two handles, depending on how its module was loaded.
        named = driver.cuFuncGetName(launch.func) if int(launch.func) else driver.cuKernelGetName(launch.kern)
        names.append(_checked(named)[0].decode())
    return names


def _checked(result: tuple) -> tuple:
    """The values of a driver call; RuntimeError with the driver's word where it failed."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name}")
    return tuple(values)
