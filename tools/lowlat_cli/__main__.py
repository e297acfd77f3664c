"""``lowlat``: doctor, plan, explain, check, bench, tune, report.

Exit codes: 0 it is as it should be; 1 it is not (what, is in the output); 2 the request could not be carried out.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated, Optional

try:
    import typer
    from rich.console import Console
except ImportError as error:
    print(f"lowlat: {error.name} is not installed; the command line needs typer and rich", file=sys.stderr)
    sys.exit(2)

from lowlat_cli import show
from lowlat_cli.record import command_line, make_record, make_tune_record, render, write_record
from lowlat_gemm.arch import ARCHES, Arch, parse_arch
from lowlat_gemm.dispatch import explain as explain_decision
from lowlat_gemm.kernels.compile_cache import CompileError
from lowlat_gemm.kernels.registry import missing_packages
from lowlat_gemm.tables import load_table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Low-latency decode GEMMs: what the library would do, whether it can, and whether it does.",
)
#: Columns of a table where no terminal says how wide it is (a log, a pipe).
PLAIN_WIDTH = 120
OUT = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
ERR = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ModelOption = Annotated[str, typer.Option(help="Model family, such as kimi_k3.")]
TpOption = Annotated[list[int], typer.Option(help="Tensor-parallel sizes; may be given again.")]
ShapeOption = Annotated[Optional[list[str]], typer.Option(help="NxK instead of a model's; may be given again.")]
TokensOption = Annotated[str, typer.Option(help="Token counts, such as 1,2,4-8.")]
RecordOption = Annotated[Optional[Path], typer.Option(help="Write the JSON record of the run to this file.")]
ArchOption = Annotated[Optional[str], typer.Option(help="GPU generation: sm90, sm100, sm103 or sm107.")]


class CannotRun(Exception):
    """The request cannot be carried out here; the message is the one line that the user sees."""


def _print_json(value) -> None:
    print(json.dumps(value, indent=1))


def _gpu_for(arch: Arch | None):
    """The first GPU of ``arch`` (of any served generation for None), or None and why there is none."""
    from lowlat_cli.environment import find_gpus

    gpus, why = find_gpus()
    for gpu in gpus:
        if gpu.arch is not None and arch in (None, gpu.arch):
            return gpu, None
    wanted = "of a served generation" if arch is None else f"of generation {arch}"
    return None, why or f"no GPU {wanted} here: found {', '.join(map(str, gpus))}"


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """This machine: GPU, driver, versions, optional packages, switches; and whether kernels can run on it."""
    from lowlat_cli.doctor import examine

    report = examine()
    if as_json:
        _print_json(report.to_json())
    else:
        show.doctor(OUT, report)
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def plan(
    model: ModelOption = "kimi_k3",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 8,
    arch: ArchOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What would run for each projection of a model, by M."""
    from lowlat_cli.planning import plan_rows

    found = _arch_or_default(arch)
    rows = plan_rows(model, tp, found)
    if as_json:
        _print_json([row.to_json() for row in rows])
    else:
        show.plan(OUT, model, tp, load_table(model, found), rows)


@app.command()
def explain(
    m: Annotated[int, typer.Argument(metavar="M", help="Tokens.")],
    n: Annotated[int, typer.Argument(metavar="N", help="Local output features.")],
    k: Annotated[int, typer.Argument(metavar="K", help="Local input features.")],
    arch: ArchOption = None,
    residual: Annotated[bool, typer.Option("--residual", help="With the residual epilogue.")] = False,
    dtype: Annotated[str, typer.Option(help="A torch dtype's name.")] = "bfloat16",
    as_json: JsonFlag = False,
) -> None:
    """The decision for one (M, N, K) and why. Exit code 1 when it falls back."""
    decision = explain_decision(m, n, k, arch=arch, has_residual=residual, dtype=dtype)
    if as_json:
        _print_json(decision.to_json())
    else:
        print(decision)
    raise typer.Exit(0 if decision.runs else 1)


@app.command()
def check(
    model: ModelOption = "kimi_k3",
    tp: TpOption = [4, 8, 16],
    arch: ArchOption = None,
    seed: Annotated[Optional[int], typer.Option(help="Seed of the random operands; a fresh one by default.")] = None,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="Fail unless cells run on a GPU.")] = False,
    record: RecordOption = None,
    as_json: JsonFlag = False,
) -> None:
    """The main job: a model's projections through the dispatcher, every cell judged against FP64."""
    from lowlat_cli import checking

    wanted = None if arch is None else parse_arch(arch)
    gpu, why_no_gpu = _gpu_for(wanted)
    if gpu is None and require_gpu:
        raise CannotRun(why_no_gpu)
    if importlib.util.find_spec("torch") is None:
        raise CannotRun("torch is not installed: cells can be planned and explained, not checked")
    if gpu is not None:
        _need_kernel_packages()
    arches = (gpu.arch,) if gpu is not None else ARCHES if wanted is None else (wanted,)
    for one in arches:
        load_table(model, one)  # a missing or broken table is said before anything long begins
    _need_writable(record)
    seed = secrets.randbits(31) if seed is None else seed
    shapes = checking.model_shapes(model, tp)
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    with show.progress(ERR, f"{model} tp {', '.join(map(str, tp))}", sum(shape.elements for shape in shapes)) as report:
        cells = checking.run_check(shapes, arches, gpu, seed, report)
    result = make_record(command_line("lowlat", sys.argv[1:]), cells, gpu, started, time.monotonic() - clock, seed)
    if record is not None:
        write_record(result, record)
    if as_json:
        print(render(result), end="")
    else:
        show.check(OUT, shapes, cells, gpu, why_no_gpu, record)
    idle = require_gpu and not result["counts"]["kernel"]
    if idle:
        ERR.print("lowlat: --require-gpu, and no cell ran on a kernel", style="red", highlight=False)
    raise typer.Exit(1 if idle or result["counts"]["failed"] else 0)


@app.command()
def bench(
    model: ModelOption = "kimi_k3",
    tp: TpOption = [8],
    shape: ShapeOption = None,
    tokens: TokensOption = "1-4,8,16",
    candidate: Annotated[
        Optional[list[str]],
        typer.Option(help="A peer beside ours and cuBLAS, or all; may be given again. Default: all but torch.compile."),
    ] = None,
    weights: Annotated[list[str], typer.Option(help="cold or warm; may be given again.")] = ["cold"],
    pdl: Annotated[list[str], typer.Option(help="on or off; may be given again.")] = ["on"],
    chain: Annotated[
        list[str], typer.Option(help="back_to_back, or linked: a norm between two GEMMs; may be given again.")
    ] = ["back_to_back", "linked"],
    replays: Annotated[int, typer.Option(help="Replays of each graph that a median is taken over.")] = 21,
    host: Annotated[bool, typer.Option("--host", help="Time the host's side of a call instead.")] = False,
    kda: Annotated[bool, typer.Option("--kda", help="Time Kimi-K3's KDA projections on two streams instead.")] = False,
    minutes: Annotated[Optional[float], typer.Option(help="Begin no other cell after this time.")] = None,
    plots: Annotated[Optional[Path], typer.Option(help="Write roofline and ratio-by-M pictures here.")] = None,
    record: RecordOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Our kernels and their peers against the streaming floor. Needs a GPU; exit code 1 for a wrong result of ours."""
    gpu, shapes, counts, title = _timing_request(model, tp, shape, tokens, record)
    from lowlat_cli import bench_command

    if host:
        code = bench_command.run_host(
            command_line("lowlat", sys.argv[1:]), title, shapes, counts, gpu,
            record=record, as_json=as_json, out=OUT, err=ERR,
        )  # fmt: skip
        raise typer.Exit(code)
    if kda:
        code = bench_command.run_kda(
            command_line("lowlat", sys.argv[1:]), counts, chain, gpu,
            replays=replays, record=record, as_json=as_json, out=OUT, err=ERR,
        )  # fmt: skip
        raise typer.Exit(code)
    code = bench_command.run(
        command_line("lowlat", sys.argv[1:]), title, shapes, counts, gpu,
        bench_command.modes(weights, pdl, chain), candidate or [],
        replays=replays, minutes=minutes, record=record, plots=plots, as_json=as_json, out=OUT, err=ERR,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def tune(
    model: ModelOption = "kimi_k3",
    tp: TpOption = [8],
    shape: ShapeOption = None,
    residual: Annotated[Optional[list[str]], typer.Option(help="NxK that is wanted with residual too.")] = None,
    tokens: TokensOption = "1-16,24,32,40,48,56,64",
    most: Annotated[int, typer.Option(min=1, help="Tilings that are timed for a shape and token class.")] = 24,
    minutes: Annotated[Optional[float], typer.Option(help="Begin no other shape after so many minutes.")] = None,
    family: Annotated[Optional[str], typer.Option(help="Family of the table; the model by default.")] = None,
    label: Annotated[Optional[str], typer.Option(help="Label of new rows, for shapes that no model names.")] = None,
    journal: Annotated[Optional[Path], typer.Option(help="File to go on from, and to add what is measured to.")] = None,
    table: Annotated[Optional[Path], typer.Option(help="Table to write; by default the family's own.")] = None,
    record: RecordOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Finds the fastest sound config of every cell and writes the table. Needs a GPU.

    Exit code 1: a candidate was wrong, hung or crashed, or a shape was not reached; what was found is written even so.
    """
    gpu, shapes, counts, title = _timing_request(model, tp, shape, tokens, record)
    from lowlat_cli import checking, parsing
    from lowlat_cli.tuning import command
    from lowlat_cli.tuning import report as tune_report
    from lowlat_cli.tuning.supervise import TuneError

    family = model if family is None else family
    if family == model:
        shapes = checking.with_names(shapes, model)
    path = command.table_path(family, gpu.arch, table)
    _need_writable(path, "--table")
    _need_writable(journal, "--journal")
    start = command.starting_text(path, family, gpu)
    wanted = [parsing.shape(text) for text in residual or ()]
    request = command.make_request(shapes, counts, wanted, gpu.arch, most, minutes)
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    try:
        with tune_report.progress(ERR, f"tune {title}") as told:
            outcome = command.tune(request, gpu, journal, told)
    except TuneError as error:
        raise CannotRun(str(error))
    written = command.write(outcome, path, start, gpu, label)
    seconds, found = time.monotonic() - clock, tune_report.outcome_json(outcome)
    result = make_tune_record(command_line("lowlat", sys.argv[1:]), family, found, gpu, started, seconds)
    if record is not None:
        write_record(result, record)
    if as_json:
        print(render(result), end="")
    else:
        tune_report.show(OUT, outcome, gpu, written)
    raise typer.Exit(1 if outcome.excluded or outcome.not_reached else 0)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Records, or folders of records.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of tables.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """What records say: geometric means by M, worst cells, what was wrong. Exit code 1 when a cell of one failed."""
    from lowlat_cli import report as report_module

    files = report_module.find_records(paths)
    if not files:
        raise CannotRun(f"no record in {', '.join(map(str, paths))}")
    found = [*map(report_module.summarise, files), *report_module.tuned_together(files)]
    if as_json:
        _print_json([one.to_json() for one in found])
    elif markdown:
        print(report_module.markdown(found), end="")
    else:
        report_module.show(OUT, found)
    raise typer.Exit(1 if any(one.failed for one in found) else 0)


def _timing_request(model: str, tp: list[int], shape: list[str] | None, tokens: str, record: Path | None):
    """What tune is asked for: the GPU, shapes, token counts and a title. CannotRun where they cannot."""
    from lowlat_cli import checking, parsing

    gpu, why_no_gpu = _gpu_for(None)
    if gpu is None:
        raise CannotRun(why_no_gpu)
    _need_kernel_packages()
    _need_writable(record)
    counts = parsing.tokens(tokens)
    shapes = [parsing.shape(text) for text in shape] if shape else checking.model_shapes(model, tp)
    return gpu, shapes, counts, ", ".join(shape) if shape else f"{model} tp {', '.join(map(str, tp))}"


def _need_kernel_packages() -> None:
    if missing_packages():
        raise CannotRun(f"kernels cannot be compiled here: not installed: {', '.join(missing_packages())}")


def _need_writable(path: Path | None, option: str = "--record") -> None:
    """Says that a file cannot be written before the run, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise CannotRun(f"{option} {path}: a folder; name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CannotRun(f"{option} {path}: {folder} cannot be written")


def _arch_or_default(name: str | None) -> Arch:
    """The named generation, else the one of a GPU that is here, else what ``arch=None`` means without CUDA."""
    from lowlat_gemm.arch import resolve_arch

    found = resolve_arch(name)
    if found is None:
        raise CannotRun("the GPU here is of no served generation; name one with --arch")
    return found


def main() -> None:
    """Entry point: errors that a user can cause are one line and exit code 2."""
    if folder := os.environ.get("BUILD_WORKING_DIRECTORY"):  # `bazel run` starts in its runfiles
        os.chdir(folder)
    try:
        app()
    except (CannotRun, CompileError, ValueError, OSError) as error:
        ERR.print(f"lowlat: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
