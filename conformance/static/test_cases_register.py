"""The register of public faults: every entry has its source, and tests that are there, or says why not."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

CASES = tomllib.loads(Path("conformance/cases_register.toml").read_text())["case"]
FIELDS = {"title", "links", "where", "tests", "not_applicable", "open"}


@functools.lru_cache(maxsize=None)
def functions_of(path: str) -> set[str]:
    """Names of the test functions of a file; empty where there is no such file."""
    file = Path(path)
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def problems(case: dict) -> list[str]:
    found = [f"unknown field {name}" for name in set(case) - FIELDS]
    for name, needed in (("title", str), ("links", list), ("where", list)):
        if type(case.get(name)) is not needed or not (case[name] or name == "links"):
            found.append(f"no {name}")
    found += [f"link {link}" for link in case.get("links") or () if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", link)]
    found += [f"where {place}" for place in case.get("where", ()) if place not in ("CPU", "H200", "Blackwell")]
    if not any(case.get(name) for name in ("tests", "not_applicable", "open")):
        found.append("neither a test nor a reason")
    for test in case.get("tests", ()):
        path, _, name = test.partition("::")
        if name not in functions_of(path):
            found.append(f"no test {test}")
    if "H200" not in case.get("where", ()) and any("/gpu/" in test for test in case.get("tests", ())):
        found.append("a test on a GPU, and where does not say so")
    return found


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: re.sub(r"\W+", "-", fault["title"])[:60])
def test_an_entry_is_whole_and_its_tests_are_there(fault):
    assert problems(fault) == [], fault["title"]


def test_no_fault_is_there_twice():
    titles = [case["title"] for case in CASES]
    assert len(titles) == len(set(titles)) >= 40


GOOD = {
    "title": "t",
    "links": ["a/b#1"],
    "where": ["CPU"],
    "tests": ["conformance/static/test_cases_register.py::test_no_fault_is_there_twice"],
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, []),
        (
            {"tests": ["conformance/static/test_cases_register.py::test_gone"]},
            ["no test conformance/static/test_cases_register.py::test_gone"],
        ),
        ({"tests": ["conformance/static/gone.py::test_a"]}, ["no test conformance/static/gone.py::test_a"]),
        ({"tests": []}, ["neither a test nor a reason"]),
        ({"tests": [], "open": "later"}, []),
        ({"links": ["https://github.com/a/b"]}, ["link https://github.com/a/b"]),
        ({"links": []}, []),
        ({"links": None}, ["no links"]),
        ({"where": []}, ["no where"]),
        ({"where": ["GPU"]}, ["where GPU"]),
        ({"source": "x"}, ["unknown field source"]),
    ],
)
def test_what_an_entry_needs(change, problem):
    assert problems(GOOD | change) == problem
