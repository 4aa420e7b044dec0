"""The operator's commands for the database."""

from typing import Annotated

import typer

db = typer.Typer(no_args_is_help=True, help="The database: its schema, and whether its rows agree.")

SHOWN = 5
"""Ids that are shown of each kind of disagreement."""


@db.command("upgrade")
def upgrade() -> None:
    """Bring the database to the schema of this version. Stop the workers of older versions before."""
    from schemas.database import Database
    from schemas.settings import settings

    database = Database(settings().store_url, upgrade=True)
    before, name = database.upgraded_from, database.url.render_as_string()
    database.close()
    typer.echo(f"{name} has the schema of this version" + (f"; it had {before} before" if before else " already"))


@db.command("check")
def check(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only look, and exit with 1 if something is found.")
    ] = False,
) -> None:
    """Compare the rows with each other, and repair what does not agree. Reads everything: with millions of jobs, that
    takes minutes."""
    from api.connections import store
    from schemas.audit import audit

    found = audit(store(), repair=not dry_run)
    for finding in found:
        shown = ", ".join(finding.ids[:SHOWN]) + (", …" if len(finding.ids) > SHOWN else "")
        remedy = "nothing was changed" if dry_run else finding.remedy
        typer.echo(f"{len(finding.ids):,} {finding.what}: {remedy} ({shown})")
    if not found:
        typer.echo("all rows agree")
    elif dry_run:
        raise typer.Exit(1)
