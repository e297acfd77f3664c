"""Files that are made from ``runners.toml`` and checked in: the CI workflow and what Bazel's platforms load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .runners import Runner

WORKFLOW = Path(".github/workflows/hardware.yml")
PLATFORMS = Path("hw_matrix/platforms/runners.bzl")
_MADE = "Made from hw_matrix/runners.toml by `./tools/bazelw run //hw_matrix -- generate`. Do not edit."

_HEAD = """\
# {made}
# The conformance suite on every GPU generation that has a runner: cut into shards, joined, reported.
name: hardware
on:
  workflow_dispatch:
  schedule:
    - cron: "17 3 * * *"
permissions:
  contents: read
jobs:
"""

_NO_RUNNER = """\
  none:
    runs-on: ubuntu-latest
    steps:
      - run: "echo 'no generation has a runner'; exit 1"
"""

_SUITE = """\
  suite:
    name: ${{{{ matrix.arch }}}} shard ${{{{ matrix.shard }}}}
    runs-on: ${{{{ matrix.labels }}}}
    timeout-minutes: ${{{{ matrix.minutes }}}}
    strategy:
      fail-fast: false
      matrix:
        include:
{include}
    steps:
      - uses: actions/checkout@v4
      - name: conformance
        env:
          LOWLAT_SHARD: ${{{{ matrix.shard }}}}
          LOWLAT_COMMIT: ${{{{ github.sha }}}}
          LOWLAT_RECORD_DIR: ${{{{ runner.temp }}}}/records
        run: |
          mkdir -p "$LOWLAT_RECORD_DIR"
          ./tools/bazelw test --config=ci --config=runner-${{{{ matrix.arch }}}} \\
            --sandbox_writable_path="$LOWLAT_RECORD_DIR" //conformance:${{{{ matrix.arch }}}}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: records-${{{{ matrix.arch }}}}-${{{{ matrix.index }}}}
          path: ${{{{ runner.temp }}}}/records
          if-no-files-found: error
"""

_MERGE = """\
  merge:
    needs: suite
    if: always()
    runs-on: ubuntu-latest
    strategy:
      fail-fast: false
      matrix:
        arch: {arches}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/download-artifact@v4
        with:
          pattern: records-${{{{ matrix.arch }}}}-*
          path: shards
      - name: join the shards; red unless every cell of the generation ran
        run: ./tools/bazelw run --config=ci //hw_matrix -- merge --arch ${{{{ matrix.arch }}}} "$PWD/shards"
      - name: report
        if: always()
        run: |
          ./tools/bazelw run --config=ci //hw_matrix -- report --out "$PWD/report"
          cat docs/hardware.md >> "$GITHUB_STEP_SUMMARY"
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: report-${{{{ matrix.arch }}}}
          path: |
            hw_matrix/records/${{{{ matrix.arch }}}}
            report
"""


def shard_matrix(runners: Mapping[str, Runner]) -> list[dict]:
    """One entry a job: each shard of each generation that has a runner."""
    return [
        {
            "arch": name,
            "shard": f"{index}/{runner.shards}",
            "index": index,
            "minutes": runner.minutes,
            "labels": list(runner.labels),
        }
        for name, runner in runners.items()
        if runner.claims_hardware
        for index in range(runner.shards)
    ]


def workflow(runners: Mapping[str, Runner]) -> str:
    """The GitHub Actions workflow. JSON values, which are YAML's flow style."""
    jobs = shard_matrix(runners)
    head = _HEAD.format(made=_MADE)
    if not jobs:
        return head + _NO_RUNNER
    include = "\n".join(f"          - {json.dumps(job)}" for job in jobs)
    arches = json.dumps(list(dict.fromkeys(job["arch"] for job in jobs)))
    return head + _SUITE.format(include=include) + _MERGE.format(arches=arches)


def platforms(runners: Mapping[str, Runner]) -> str:
    """Starlark: generation -> exec_properties of its machines on a remote-execution cluster."""
    entries = "".join(
        f'    "{name}": {{\n'
        + "".join(f'        "{key}": "{value}",\n' for key, value in runner.exec_properties.items())
        + "    },\n"
        for name, runner in runners.items()
    )
    return f'"""{_MADE}"""\n\nEXEC_PROPERTIES = {{\n{entries}}}\n'


def made_files(runners: Mapping[str, Runner]) -> dict[Path, str]:
    """Path from the repository's root -> what it has to hold."""
    return {WORKFLOW: workflow(runners), PLATFORMS: platforms(runners)}
