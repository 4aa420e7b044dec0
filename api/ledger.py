"""The commands `evalpool db upgrade` and `evalpool db check`."""

from contextlib import suppress
from typing import Annotated

import typer

db = typer.Typer(no_args_is_help=True, help="Upgrade the database, or check and repair its rows.")

SHOWN = 5
"""How many ids are shown for each kind of inconsistency."""


@db.command("upgrade")
def upgrade() -> None:
    """Upgrade the database to the schema of this version. Stop the workers of older versions first."""
    from evalpool.schemas.database import Database
    from evalpool.schemas.settings import settings

    database = Database(settings().store_url, upgrade=True)
    before, name = database.upgraded_from, database.url.render_as_string()
    database.close()
    typer.echo(f"{name} has the schema of this version" + (f"; it had {before} before" if before else " already"))


@db.command("check")
def check(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, and exit with code 1 if there are inconsistencies.")
    ] = False,
) -> None:
    """Find rows that contradict each other, and repair them. The check reads every row, which takes minutes with
    millions of jobs."""
    from evalpool.api.connections import bell, store
    from evalpool.schemas.audit import audit
    from evalpool.worker.queue.publish import UNREACHABLE, wake

    found = audit(store(), repair=not dry_run)
    if found and not dry_run:
        with suppress(*UNREACHABLE):  # the workers' next poll finds the jobs that are queued again
            wake(bell().client, "repaired jobs")
    for finding in found:
        shown = ", ".join(finding.ids[:SHOWN]) + (", …" if len(finding.ids) > SHOWN else "")
        remedy = "nothing was changed" if dry_run else finding.remedy
        typer.echo(f"{len(finding.ids):,} {finding.what}: {remedy} ({shown})")
    if not found:
        typer.echo("all rows are consistent")
    elif dry_run:
        raise typer.Exit(1)
