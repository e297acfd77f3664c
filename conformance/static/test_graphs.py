"""Taking PDL out of a captured graph, and naming what a graph launches, against a driver that only keeps books."""

from __future__ import annotations

import pytest

from lowlat_cli import graphs

driver = pytest.importorskip("cuda.bindings.driver")


class Edge:
    def __init__(self, programmatic: bool):
        self.type = int(programmatic)


class Books:
    """The graph functions of a driver over one graph: ``edges`` (from, to, data), ``nodes`` (kind, func, kern)."""

    def __init__(self, edges=(), nodes=()):
        self.edges, self.nodes = list(edges), list(nodes)

    def cuGraphGetEdges(self, graph, count=0):
        columns = [list(column) for column in zip(*self.edges[:count])] or [[], [], []]
        return OK, *columns, len(self.edges)

    def cuGraphRemoveDependencies(self, graph, origins, targets, data, count):
        for edge in zip(origins, targets, data):
            self.edges.remove(edge)  # with the data that it has, as the driver demands
        return (OK,)

    def cuGraphAddDependencies(self, graph, origins, targets, data, count):
        self.edges += zip(origins, targets, data)
        return (OK,)

    def cuGraphGetNodes(self, graph, count=0):
        return OK, self.nodes[:count], len(self.nodes)

    def cuGraphNodeGetType(self, node):
        return OK, node[0]

    def cuGraphKernelNodeGetParams(self, node):
        return OK, type("Params", (), {"func": node[1], "kern": node[2]})

    def cuFuncGetName(self, func):
        return OK, f"func {func}".encode()

    def cuKernelGetName(self, kern):
        return OK, f"kern {kern}".encode()


OK = driver.CUresult.CUDA_SUCCESS


@pytest.fixture
def keep(monkeypatch):
    def use(books: Books) -> Books:
        for name in [name for name in vars(Books) if name.startswith("cu")]:
            monkeypatch.setattr(driver, name, getattr(books, name))
        return books

    return use


def test_each_programmatic_edge_becomes_a_full_one(keep):
    books = keep(Books([("a", "b", Edge(True)), ("b", "c", Edge(False)), ("c", "d", Edge(True))]))
    assert graphs.cut_programmatic_edges(1) == 2
    assert sorted((origin, target, int(data.type)) for origin, target, data in books.edges) == [
        ("a", "b", 0), ("b", "c", 0), ("c", "d", 0),
    ]  # fmt: skip


def test_a_graph_without_pdl_stays_as_it_is(keep):
    edge = ("a", "b", Edge(False))
    books = keep(Books([edge]))
    assert graphs.cut_programmatic_edges(1) == 0 and books.edges == [edge]
    assert graphs.cut_programmatic_edges(1) == 0
    keep(Books())
    assert graphs.cut_programmatic_edges(1) == 0


def test_a_refusal_of_the_driver_is_an_error(keep, monkeypatch):
    keep(Books([("a", "b", Edge(True))]))
    monkeypatch.setattr(driver, "cuGraphAddDependencies", lambda *a: (driver.CUresult.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        graphs.cut_programmatic_edges(1)


class Recorder:
    """Stands for torch.cuda.CUDAGraph. ``log``: what was done to it."""

    def __init__(self, keep_graph=False):
        self.keep_graph, self.log = keep_graph, []

    def capture_begin(self):
        self.log.append("begin")

    def capture_end(self):
        self.log.append("end")

    def raw_cuda_graph(self):
        assert self.keep_graph, "a graph that torch has instantiated cannot be edited"
        return 1

    def instantiate(self):
        self.log.append("instantiate")


@pytest.fixture
def recorder(monkeypatch):
    import contextlib

    import torch

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def test_the_edges_are_cut_before_the_graph_is_instantiated(keep, recorder, monkeypatch):
    keep(Books([("a", "b", Edge(True))]))
    cut, calls = graphs.cut_programmatic_edges, []
    monkeypatch.setattr(graphs, "cut_programmatic_edges", lambda raw: calls.append(("cut", cut(raw))))
    graph = graphs.capture([lambda: calls.append("launch")], pdl=False)
    assert calls == ["launch", ("cut", 1)] and graph.log == ["begin", "end", "instantiate"]
    calls.clear()
    graph = graphs.capture([lambda: calls.append("launch")])
    assert calls == ["launch"] and graph.log == ["begin", "end"] and not graph.keep_graph


def test_a_capture_ends_where_a_call_raises(recorder, monkeypatch):
    import torch

    kept = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: kept.append(Recorder()) or kept[0])
    with pytest.raises(ZeroDivisionError):
        graphs.capture([lambda: 1 / 0])
    assert kept[0].log == ["begin", "end"]


def test_kernels_are_named_in_their_order_and_other_nodes_by_their_kind(keep, recorder):
    kinds = driver.CUgraphNodeType
    kernel = kinds.CU_GRAPH_NODE_TYPE_KERNEL
    keep(Books(nodes=[(kinds.CU_GRAPH_NODE_TYPE_MEMSET, 0, 0), (kernel, 7, 0), (kernel, 0, 8)]))
    assert graphs.kernel_names(lambda: None) == ["memset", "func 7", "kern 8"]
