"""Joins the records of a suite's shards into one, or says what is missing: nothing is lost quietly.

Refused are: a missing or double shard, shards that collected different tests or did not run what they collected, a
suite of which the repository has more test files than ran, another GPU, driver or compiler than ``runners.toml`` names,
several commits, a tree with local changes, a test that failed, and a cell of the generation's tables that did not run on
its kernel. A run with failed tests can be kept as what it is, a red one: with every cell in it, and those tests by name.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from conformance.sharding import digest
from lowlat_cli.record import SCHEMA
from lowlat_gemm.arch import Arch

from .coverage import Proof, Record, cell_states
from .runners import Runner

KIND = "conformance shard"
#: At most so many names in one line of a refusal.
NAMED = 5


class MergeError(ValueError):
    """What is wrong with the shards, one line each."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def find_shards(paths: Iterable[Path]) -> list[Record]:
    """Shard records in files, below folders, and in Bazel's outputs.zip files. Other files are passed over."""
    found: list[Record] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix == ".json":
                found += _shard(str(file), file.read_bytes())
            elif file.suffix == ".zip":
                with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as archive:
                    for name in sorted(archive.namelist()):
                        if name.endswith(".json"):
                            found += _shard(f"{file}:{name}", archive.read(name))
    return found


def _shard(name: str, content: bytes) -> list[Record]:
    try:
        data = json.loads(content)
    except ValueError:
        raise MergeError([f"{name}: not a whole JSON file"]) from None
    return [Record(name, data)] if isinstance(data, dict) and data.get("kind") == KIND else []


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + rest


def shard_problems(shards: Sequence[Record]) -> list[str]:
    """What keeps the shards from being one whole suite."""
    if not shards:
        return ["no shard record found"]
    totals, digests = {s.data["shard"]["total"] for s in shards}, {s.data["shard"]["digest"] for s in shards}
    if len(totals) > 1 or len(digests) > 1:
        return [
            f"shards of different suites: totals {sorted(totals)}, {len(digests)} different sets of collected tests"
        ]
    indices, total = sorted(s.data["shard"]["index"] for s in shards), totals.pop()
    if indices != list(range(total)):
        return [f"need each of shards 0 to {total - 1} once, found {', '.join(map(str, indices))}"]
    ran = [test["id"] for shard in shards for test in shard.data["tests"]]
    if not ran:
        return ["no test ran"]
    if digest(ran) != digests.pop():
        return [
            f"{len(ran)} tests ran, {shards[0].data['shard']['collected']} were collected: "
            "some were left out or ran twice"
        ]
    return []


def file_problems(shards: Sequence[Record], folder: Path) -> list[str]:
    """Test files of a suite's ``folder`` of which no test is in the shards: shards agree on what a part of the suite
    collected just as well. Tests outside of the folder's parent are in targets of a file each, and are not asked for."""
    if not any(Path(test["id"]).parts[0] == folder.parent.name for shard in shards for test in shard.data["tests"]):
        return []
    wanted = {path.name for path in folder.glob("test_*.py")}
    if not wanted:
        return [f"{folder}: no test files there to compare with"]
    ran = {Path(test["id"].split("::")[0]).name for shard in shards for test in shard.data["tests"]}
    missing = sorted(wanted - ran)
    return [f"no test of {_some(missing)} ran"] if missing else []


def machine_problems(shards: Sequence[Record], runner: Runner, *, on_gpu: bool) -> list[str]:
    """Where the shards ran on something else than the runner has; without ``on_gpu`` its compiler alone counts."""
    found = []
    for shard in shards:
        machine = shard.data["machine"]
        versions = dict(shard.data["versions"]) | {"driver": machine["driver"]}
        if on_gpu and shard.gpu != runner.gpu:
            found.append(f"{shard.name}: ran on {shard.gpu or 'no GPU'}, the runner of {runner.arch} has {runner.gpu}")
        if problem := runner.toolchain_problem(versions, without=() if on_gpu else ("driver",)):
            found.append(f"{shard.name}: {problem}")
    commits = {str(shard.data["commit"]) for shard in shards}
    if len(commits) > 1:
        found.append(f"shards of {len(commits)} commits: {_some(sorted(commits))}")
    found += [
        f"commit {commit}: a record is of a commit, without local changes"
        for commit in commits
        if not _is_commit(commit)
    ]
    return found


def _is_commit(name: str) -> bool:
    return len(name) == 40 and set(name) <= set("0123456789abcdef")


def joined(shards: Sequence[Record]) -> dict:
    """One record of all shards: every cell, how many tests came to each outcome, and the tests that did not pass."""
    ordered = sorted(shards, key=lambda shard: shard.data["shard"]["index"])
    first = ordered[0].data
    tests = [test for shard in ordered for test in shard.data["tests"]]
    cells = [cell for shard in ordered for cell in shard.data["cells"]]
    outcomes = [test["outcome"] for test in tests]
    return {
        "schema": SCHEMA,
        "kind": "conformance",
        "suite": first["suite"],
        "arch": first["arch"],
        "command": first["command"],
        "started": min(shard.data["started"] for shard in ordered),
        "seconds": round(sum(shard.data["seconds"] for shard in ordered), 1),
        "commit": first["commit"],
        "machine": first["machine"],
        "versions": first["versions"],
        "kernel_sources": first["kernel_sources"],
        "seeds": [shard.data["seed"] for shard in ordered],
        "shards": len(ordered),
        "outcomes": {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)},
        "counts": {status: sum(shard.data["counts"][status] for shard in ordered) for status in first["counts"]},
        "tests": [test for test in tests if test["outcome"] != "passed"],
        "cells": sorted(cells, key=lambda cell: (cell["n"], cell["k"], cell["residual"], cell["m"], cell["status"])),
    }


def merge(
    shards: Sequence[Record],
    runners: Mapping[str, Runner],
    arch: Arch,
    sources: Path,
    *,
    with_gpu: bool = True,
    red: bool = False,
) -> list[dict]:
    """The joined records of a generation: that of its GPU suite, and that of its cross-compile suite where it is among
    the shards (without ``with_gpu`` that alone). Every other suite in there must be whole and right as well: of each
    test file that ``sources``, the folder ``conformance``, has for it some test ran. ``red``: tests that did not pass are
    left to the record, which names them. Raises MergeError with everything that is wrong."""
    by_suite: dict[str, list[Record]] = {}
    for shard in shards:
        by_suite.setdefault(shard.data["suite"], []).append(shard)
    records, problems = [], []
    suites = {f"gpu_{arch}": HARDWARE_ENOUGH, f"crosscompile_{arch}": COMPILED_ENOUGH}
    needed = next(iter(suites)) if with_gpu else f"crosscompile_{arch}"
    if needed not in by_suite:
        problems.append(f"no record of {needed} among {_some(by_suite) or 'no shards at all'}")
    for suite, members in by_suite.items():
        found = shard_problems(members) or file_problems(members, sources / suite.removesuffix(f"_{arch}"))
        if not found:
            record = joined(members)
            found = [] if red else test_problems(record)
            if suite in suites:
                found += machine_problems(members, runners[arch.name], on_gpu=suite.startswith("gpu"))
                found += _cells_without_proof(arch, record, runners[arch.name], suites[suite])
                records.append(record)
        problems += [f"{suite}: {problem}" for problem in found]
    if problems:
        raise MergeError(problems)
    return records


#: What each cell of the generation must have come to in its GPU suite, and in its cross-compile suite.
HARDWARE_ENOUGH = (Proof.HARDWARE, Proof.WAIVED)
COMPILED_ENOUGH = (Proof.COMPILED, Proof.MODEL)


def test_problems(record: dict) -> list[str]:
    """The tests of a joined record that did not pass, in one line."""
    allowed = ("passed", "waived") if record["machine"]["gpu"] else ("passed", "waived", "skipped")
    failed = [test["id"] for test in record["tests"] if test["outcome"] not in allowed]
    return [f"{len(failed)} tests did not pass: {_some(failed)}"] if failed else []


def _cells_without_proof(arch: Arch, record: dict, runner: Runner, enough: tuple[Proof, ...]) -> list[str]:
    states = cell_states(arch, [Record("this", record)], runner)
    missing = [state for state in states if state.proof not in enough]
    if not missing:
        return []
    named = _some(f"{state.case} ({state.proof})" for state in missing)
    return [f"{len(missing)} of {len(states)} cells of {arch} are not {enough[0]}: {named}"]


def file_name(record: Mapping) -> str:
    """``gpu-2026-11-30-0123456.json``: suite, day and commit."""
    return f"{record['suite'].split('_')[0]}-{record['started'][:10]}-{record['commit'][:7]}.json"
