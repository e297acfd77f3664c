"""``hw_matrix``: status, merge, report, generate.

Exit codes: 0 it is as it should be; 1 it is not (what, is in the output); 2 the request could not be carried out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
except ImportError as error:
    print(f"hw_matrix: {error.name} is not installed; the command line needs typer and rich", file=sys.stderr)
    sys.exit(2)

from hw_matrix import markdown
from hw_matrix import merge as merging
from hw_matrix.runners import RunnersError, load_runners
from hw_matrix.summary import Summary, summarize
from hw_matrix.workflow import made_files
from lowlat_cli.record import write_record
from lowlat_gemm.arch import parse_arch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Which cells of the tables are proven on which GPU generation, and by what.",
)
OUT = Console(width=None if sys.stdout.isatty() else 120)
ERR = Console(stderr=True)
#: Cells without a record that `status` prints by name, a generation.
NAMED = 10

RecordsOption = Annotated[Optional[Path], typer.Option(help="Folder of records instead of the repository's.")]


def root() -> Path:
    """The repository: under `bazel run` the user's, for the runfiles are copies that cannot be written."""
    return Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or Path.cwd())


def _records(folder: Path | None) -> Path:
    return _users(folder) if folder else root() / "hw_matrix" / "records"


def _users(path: Path) -> Path:
    """A path as the user wrote it: `bazel run` changes the folder."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")) / path


def print_status(summary: Summary) -> None:
    generations = summary.generations
    grid = Grid("cells", *(f"{one.arch}\n{one.runner.gpu}" for one in generations), box=box.SIMPLE)
    grid.add_row("total", *(str(len(one.states)) for one in generations))
    for proof in generations[0].proofs:
        grid.add_row(str(proof), *(str(one.proofs[proof] or "") for one in generations))
    grid.add_section()
    for kind in generations[0].provenances:
        grid.add_row(kind, *(str(one.provenances[kind] or "") for one in generations))
    grid.add_section()
    grid.add_row(
        "worst error / bound", *("" if one.worst is None else f"{one.worst.worst_share:.3f}" for one in generations)
    )
    OUT.print(grid)
    for generation in summary.generations:
        for text in generation.red:
            OUT.print(text, highlight=False, soft_wrap=True, markup=False)
        for record in generation.stale:
            OUT.print(f"{record.name}: the kernels' sources have changed since", highlight=False, soft_wrap=True)
        for state in generation.missing[:NAMED]:
            reason = f": {state.reason}" if state.reason else ""
            OUT.print(f"no hardware record: {state.case} ({state.proof}{reason})", highlight=False, soft_wrap=True)
        if len(generation.missing) > NAMED:
            OUT.print(f"... and {len(generation.missing) - NAMED} more cells of {generation.arch}", highlight=False)


@app.command()
def status(records: RecordsOption = None) -> None:
    """The cells of every table by proof. Exit code 1 unless every cell that claims hardware has a record.

    A cell claims hardware where its generation has a runner in runners.toml, and where its choice is said to be
    measured.
    """
    summary = summarize(_records(records))
    print_status(summary)
    claimed = sum(state.claims for generation in summary.generations for state in generation.states)
    missing = len(summary.missing)
    OUT.print(f"{claimed - missing} of {claimed} cells that claim hardware have a record", highlight=False)
    raise typer.Exit(1 if missing else 0)


@app.command()
def merge(
    shards: Annotated[list[Path], typer.Argument(help="Shard records: files, folders, Bazel's outputs.zip.")],
    arch: Annotated[str, typer.Option(help="GPU generation: sm90, sm100, sm103 or sm107.")],
    without_gpu: Annotated[bool, typer.Option("--without-gpu", help="The cross-compile suite alone.")] = False,
    red: Annotated[bool, typer.Option("--red", help="Keep a run with failed tests: they are in its record.")] = False,
    records: RecordsOption = None,
) -> None:
    """Joins the records of a suite's shards into the records folder. Exit code 1, and nothing written, unless all
    shards are there, every test passed, and every cell of the generation's tables ran on its kernel. With --red failed
    tests do not keep it from being written, and the exit code is 1 all the same."""
    generation = parse_arch(arch)
    paths = [_users(path) for path in shards]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is not there")
    try:
        found, sources = merging.find_shards(paths), root() / "conformance"
        made = merging.merge(found, load_runners(), generation, sources, with_gpu=not without_gpu, red=red)
    except merging.MergeError as error:
        for problem in error.problems:
            ERR.print(f"not merged: {problem}", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1)
    for record in made:
        path = _records(records) / arch / merging.file_name(record)
        write_record(record, path)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in record["outcomes"].items())
        OUT.print(f"{path}: {record['shards']} shards, {outcomes}", highlight=False, soft_wrap=True)
    failed = [problem for record in made for problem in merging.test_problems(record)]
    for problem in failed:
        ERR.print(f"red: {problem}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    out: Annotated[
        Optional[Path], typer.Option(help="Folder for index.html; without it only docs/hardware.md is made.")
    ] = None,
    records: RecordsOption = None,
) -> None:
    """One static HTML page, and one Markdown table in docs/hardware.md."""
    summary = summarize(_records(records))
    made = [
        (
            root() / "docs" / "hardware.md" if records is None else _users(out or Path()) / "hardware.md",
            markdown.render(summary),
        )
    ]
    if out is not None:
        from hw_matrix import page

        made.append((_users(out) / "index.html", page.render(summary)))
    for path, text in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        OUT.print(str(path), highlight=False, soft_wrap=True)


@app.command()
def generate() -> None:
    """Writes what is made from runners.toml: the CI workflow, and what Bazel's platforms load."""
    for path, text in made_files(load_runners()).items():
        (root() / path).parent.mkdir(parents=True, exist_ok=True)
        (root() / path).write_text(text)
        OUT.print(str(path), highlight=False)


def main() -> None:
    try:
        app()
    except (OSError, ValueError, RunnersError) as error:
        ERR.print(f"hw_matrix: {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
