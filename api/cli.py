"""The command line. Each command reads its options and calls what Python users call."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api import ledger, machine

if TYPE_CHECKING:
    from schemas.report import Report

app = typer.Typer(
    name="evalpool",
    help="Evaluate code in batches, in hardened sandboxes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(machine.images, name="images")
app.add_typer(ledger.db, name="db")
app.command()(machine.doctor)

File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Samples or jobs, one JSON object per line; .gz is fine, - is standard input."),
]
Format = Annotated[
    str,
    typer.Option(help="auto (by keys), humaneval, evalplus, mbpp, multipl-e, lcb, apps, bigcode or native."),
]
Problems = Annotated[
    str | None,
    typer.Option(help="The problems; default: in the samples, or those the format is known for."),
]
CpuSeconds = Annotated[float | None, typer.Option(help="CPU time of each job that names no limit.")]
MemoryMib = Annotated[int | None, typer.Option(help="Memory of each job that names no limit.")]
Extract = Annotated[
    str, typer.Option("--extract-code", help="Which fenced block of a sample is its code: first, last or none.")
]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="Run each sample so often, to find flaky ones.")]
Dedup = Annotated[bool, typer.Option("--dedup/--no-dedup", help="Run identical jobs once and share the result.")]
Cache = Annotated[bool, typer.Option("--cache", help="Share results with identical jobs of earlier batches, too.")]
Force = Annotated[bool, typer.Option("--force", help="Run again what has been run before.")]
Ks = Annotated[str, typer.Option("--k", help="Which pass@k to report.")]
Out = Annotated[Path | None, typer.Option(help="Directory for results.jsonl, report.html, tables and the like.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Batch = Annotated[str, typer.Argument(metavar="BATCH", help="The id of a batch.")]


@app.command()
def run(
    file: File,
    format: Format = "auto",  # noqa: A002 - the option's name
    problems: Problems = None,
    k: Ks = "1,10,100",
    slots: Annotated[
        int | None, typer.Option(min=1, max=256, help="Jobs at a time, of the worker this starts.")
    ] = None,
    cpu_seconds: CpuSeconds = None,
    memory_mib: MemoryMib = None,
    extract_code: Extract = "none",
    repeat: Repeat = 1,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the reference solutions here; give samples ten times as long.")
    ] = False,
    dedup: Dedup = True,
    cache: Cache = False,
    out: Out = None,
    as_json: AsJson = False,
    fail_under: Annotated[float | None, typer.Option(min=0, max=1, help="Exit with 6 if pass@1 is less.")] = None,
    force: Force = False,
) -> None:
    """Evaluate a file: submit its jobs, wait, report. The same command again resumes."""
    from api import formats, runs
    from api.display import Display
    from api.embedded import embedded
    from schemas.settings import settings

    ks = _ks(k)
    if out is not None:
        _make(out)
    with formats.read(file, format, problems, _limits(cpu_seconds, memory_mib), extract_code) as data:
        plan = runs.Run(data, runs.load(data), repeat, dedup, cache, force)
        with embedded(settings(), slots) as servers:
            if servers.private:
                machine.report()
            elif slots is not None:
                runs.say("--slots has no effect: the workers behind EVALPOOL_REDIS_URL have their own")
            if calibrate:
                plan = plan.calibrated(servers)
            batch = plan.submit()
            runs.follow(batch, servers, Display(), resumes=not force)
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
    """Submit a file to the configured workers and print the batch id."""
    from api import formats, runs

    with formats.read(file, format, problems, _limits(cpu_seconds, memory_mib), extract_code) as data:
        typer.echo(runs.Run(data, runs.load(data), repeat, dedup, cache, force).submit().id)


@app.command()
def status(batch: Batch, as_json: AsJson = False) -> None:
    """Show how far a batch has come, and why its jobs wait."""
    from api.jobs import get_batch
    from api.waiting import reasons

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
    """Print the results there are, one JSON object per line, in the order of submission."""
    from api.jobs import get_batch
    from schemas.terminal import escaped

    for result in get_batch(batch).stream():
        typer.echo(escaped(result.model_dump_json()))


@app.command()
def report(batch: Batch, k: Ks = "1,10,100", out: Out = None, as_json: AsJson = False) -> None:
    """Sum a batch up, as far as it has come."""
    from api import runs
    from api.jobs import get_batch

    handle = get_batch(batch)
    summed = handle.report(_ks(k))
    if out is not None:
        _make(out)
        runs.export(handle, summed, out)
    _show(summed, as_json)


@app.command()
def cancel(batch: Batch) -> None:
    """Cancel what is left of a batch."""
    from api.jobs import get_batch

    typer.echo(f"{get_batch(batch).cancel()} waiting jobs cancelled; running ones are being stopped", err=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(context: typer.Context) -> None:
    """Run a worker here; further options are Celery's."""
    from api.embedded import celery_command

    command = celery_command("worker", "--without-gossip", "--without-mingle", "--loglevel=INFO", *context.args)
    os.execv(command[0], command)


@app.command()
def version() -> None:
    """Print the version."""
    from schemas.version import version as installed

    typer.echo(installed())


def main(arguments: list[str] | None = None) -> None:
    """The console script: our own errors are one line on stderr, 2 if the input is at fault and 1 if we are."""
    from schemas.errors import EvalpoolError, IdempotencyConflict, InvalidJob, NotFound
    from schemas.terminal import plain

    try:
        app(arguments)
    except EvalpoolError as error:
        print(f"evalpool: {plain(str(error))}", file=sys.stderr)  # noqa: T201 - this is the terminal
        sys.exit(2 if isinstance(error, InvalidJob | NotFound | IdempotencyConflict) else 1)
    except Exception as error:
        # Importing SQLAlchemy here would be slow. If nobody has imported it, the database cannot have failed.
        failure = getattr(sys.modules.get("sqlalchemy.exc"), "DBAPIError", ())
        if not isinstance(error, failure):
            raise
        print(f"evalpool: the database failed: {plain(str(error))}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _limits(cpu_seconds: float | None, memory_mib: int | None) -> dict[str, float]:
    given = {"cpu_seconds": cpu_seconds, "memory_mib": memory_mib}
    return {name: value for name, value in given.items() if value is not None}


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
        raise typer.BadParameter(f"{directory}: {error.strerror}", param_hint="--out") from None


def _show(report: "Report", as_json: bool) -> None:
    from rich.console import Console

    from api import reports, runs

    if as_json:
        typer.echo(json.dumps(runs.summary(report)))
        return
    Console().print(reports.render(report))
    typer.echo(reports.scores(report))  # the last line, for scripts that look for it


if __name__ == "__main__":
    main()
