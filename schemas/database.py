"""The database: its engine, its clock, and the version of its schema."""

import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, Float, create_engine, event, inspect, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InvalidatePoolError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from evalpool.schemas.errors import SchemaMismatch, SetupError
from evalpool.schemas.privacy import private_database

MIGRATIONS = Path(__file__).parent / "migrations"
MIGRATION_LOCK = 0x65766C70
"""The advisory lock of PostgreSQL under which one process at a time migrates."""
BUSY_SECONDS, RETRY_SECONDS = 30.0, 0.001
"""How long a transaction waits for SQLite's write lock, and how often it tries to get it."""
PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_SECONDS * 1000:.0f}", "foreign_keys=ON")
FRESH_SECONDS = 0.5
"""A connection to PostgreSQL that was idle for longer is tested before it is used."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OFFSETS = Path("/proc/self/timens_offsets")


class clock(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """The database's own clock, in seconds since 1970: the one clock that all workers share.

    SQLite has no clock of its own, only the wall clock of the machine, and leases must not expire because somebody sets
    that clock. So its clock is the seconds since boot, which never jump, plus an offset from the table `clocks`.
    """

    type = Float()
    inherit_cache = True


@compiles(clock, "sqlite")
def _sqlite_clock(_element: Any, _compiler: Any, **_: Any) -> str:
    return _SQLITE_CLOCK


@compiles(clock, "postgresql")
def _postgresql_clock(_element: Any, _compiler: Any, **_: Any) -> str:
    return "extract(epoch FROM clock_timestamp())::float8"


class Database:
    """A connection pool to one database whose schema is known to be ours."""

    def __init__(self, url: str, *, upgrade: bool = False) -> None:
        """Open a database. An empty one gets our tables. A database of an older version is upgraded if `upgrade` is
        set, and refused otherwise, since workers of that version may still use it. Raises `SetupError` and
        `SchemaMismatch`."""
        self.url = make_url(url)
        self.engine = _sqlite(url) if self.url.get_backend_name() == "sqlite" else _postgresql(url)
        self._writer: AbstractContextManager[Any] = (
            threading.Lock() if self.engine.dialect.name == "sqlite" else nullcontext()
        )
        """SQLite has one writer at a time. The threads of one process take turns here, where waiting costs nothing."""
        self.upgraded_from = self._migrate(upgrade)
        """The schema before the upgrade; `None` if the database was up to date."""
        if self.engine.dialect.name == "sqlite":
            self._set_clock()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        with self._connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def glance(self) -> Iterator[Connection]:
        """Run one statement that only reads. PostgreSQL needs no transaction for that, which saves two messages."""
        if self.engine.dialect.name != "postgresql":
            with self.read() as connection:
                yield connection
        else:
            with self._connect(isolation_level="AUTOCOMMIT") as connection:
                yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that writes. It holds SQLite's write lock from the start, since getting the lock later can
        fail."""
        with self._writer, self._connect(evalpool_write=True) as connection, connection.begin():
            yield connection

    def _connect(self, **options: Any) -> Connection:
        return self.engine.connect().execution_options(**options)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def _migrate(self, upgrade: bool) -> str | None:
        """Create our schema in an empty database, and upgrade an older one if `upgrade` is set. Refuse all others."""
        script = ScriptDirectory(str(MIGRATIONS))
        head = script.get_current_head()
        name = self.url.render_as_string()
        try:
            with self.engine.connect() as connection:
                found = _revision(connection)
        except OperationalError as error:
            self.close()
            raise SetupError(
                f"the database {name} does not answer: {cause(error)}; start it, or correct EVALPOOL_DATABASE_URL"
            ) from error
        except Exception as error:
            self.close()
            raise SetupError(
                f"{name} cannot be used as the database of evalpool: {cause(error)}; set EVALPOOL_DATABASE_URL to "
                "another one"
            ) from error
        if found == head:
            return None
        if found is not None and found not in {revision.revision for revision in script.walk_revisions()}:
            self.close()
            raise SchemaMismatch(
                f"the database {name} has schema {found}, which this version of evalpool (schema {head}) does not "
                "know: upgrade evalpool, or set EVALPOOL_DATABASE_URL to another database"
            )
        if found is not None and not upgrade:
            self.close()
            raise SchemaMismatch(
                f"the database {name} has schema {found}, and this version of evalpool needs {head}: stop the "
                "workers of the older version, then run `evalpool db upgrade`"
            )
        with self.write() as connection:
            if connection.dialect.name == "postgresql":
                # Migrating millions of rows takes longer than the timeouts for ordinary statements, and so does waiting
                # for another process that is migrating.
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            config = Config()
            config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))  # as in any such file
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return found or "none"

    def _set_clock(self) -> None:
        """Set the offset of the clock, once for each boot of the machine. Later processes use the same offset."""
        known = text("SELECT 1 FROM clocks WHERE boot_id = boot_id()")
        with self.read() as connection:
            if connection.execute(known).first():
                return
        with self.write() as connection:
            if connection.execute(known).first():  # another process was faster
                return
            add = "INSERT INTO clocks (id, boot_id, start) SELECT count(*) + 1, boot_id(), :start FROM clocks"
            connection.execute(text(add), {"start": time.time() - since_boot()})
            for correction in _CORRECTIONS:
                connection.execute(text(correction.format(now=_SQLITE_CLOCK)))


_SQLITE_CLOCK = "(since_boot() + (SELECT start FROM clocks WHERE boot_id = boot_id()))"
_CORRECTIONS = (
    "UPDATE jobs SET lease_until = {now} + 15 WHERE state = 'running' AND lease_until > {now} + 15",
    "UPDATE jobs SET lease_until = NULL WHERE state = 'queued' AND lease_until > {now} + 3600",
    "UPDATE batches SET cancelled_at = {now} WHERE todo IS NOT NULL AND cancelled_at > {now}",
    "UPDATE batches SET created_at = {now} WHERE todo IS NOT NULL AND created_at > {now}",
    "DELETE FROM workers WHERE seen_at > {now}",
)
"""Corrections for a clock that is behind that of the boot before, because the machine's clock was wrong then or is
wrong now. Times in the future are reduced to the largest possible value, so that nothing waits for the difference. Live
workers renew their leases in time and are not affected. 15 s is the default of `EVALPOOL_LEASE_SECONDS`."""


def upsert(connection: Connection, table: Any) -> Any:
    """An INSERT of the database's own dialect, which can be told what to do about rows that exist already."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def cause(error: BaseException) -> str:
    """The first line of the database's own error message, without the statement."""
    error = getattr(error, "orig", None) or error
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def since_boot() -> float:
    """Seconds since this machine was started. All processes see the same value, and nobody can set it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """The name of the clock that `since_boot` reads. A container can have its own boot id or its own offset."""
    try:
        booted = BOOT_ID.read_text().strip()
    except OSError:  # not Linux; the hour of the boot is precise enough
        return str(round((time.time() - since_boot()) / 3600))
    try:
        offsets = dict(line.split(maxsplit=1) for line in OFFSETS.read_text().splitlines())
    except (OSError, ValueError):  # a kernel without time namespaces
        offsets = {}
    moved = " ".join(offsets.get("boottime", "0 0").split())
    return booted if moved == "0 0" else f"{booted} {moved}"


def _sqlite(url: str) -> Engine:
    path = make_url(url).database
    if path and path != ":memory:":
        private_database(Path(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    booted = boot_id()

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # `_begin` sends BEGIN instead of the driver
        connection.create_function("since_boot", 0, since_boot)
        connection.create_function("boot_id", 0, lambda: booted, deterministic=True)
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("evalpool_write"):
            _lock(connection)
        else:
            connection.exec_driver_sql("BEGIN")

    return engine


def _lock(connection: Connection) -> None:
    """Begin a transaction that writes. While another process writes, SQLite itself would sleep for up to 100 ms between
    two tries, although most transactions take a few milliseconds."""
    driver: Any = connection.connection.driver_connection
    end = time.monotonic() + BUSY_SECONDS
    driver.execute("PRAGMA busy_timeout=0").close()
    try:
        while time.monotonic() < end:
            try:
                driver.execute("BEGIN IMMEDIATE").close()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    break
                time.sleep(RETRY_SECONDS)
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # it most likely fails, and SQLAlchemy knows how to say it
    finally:
        driver.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000:.0f}").close()


def _postgresql(url: str) -> Engine:
    # A dead server or a forgotten lock must cause an error, which is retried, and not a hang. A client that is cut off
    # in the middle of a transaction must not keep its rows locked.
    options = (
        "-c statement_timeout=120000 -c lock_timeout=30000 -c idle_in_transaction_session_timeout=10000 "
        "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3 "
        # A plan is kept with its statement. One that was made while a table was nearly empty must not read the whole
        # table when that has millions of rows.
        "-c enable_seqscan=off -c jit=off"
    )
    engine = create_engine(url, connect_args={"connect_timeout": 10, "options": options})

    @event.listens_for(engine, "checkin")
    def _returned(_connection: Any, record: Any) -> None:
        record.info["returned"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _lent(connection: Any, record: Any, _proxy: Any) -> None:
        # The server may have been restarted while the connection was idle. A busy worker does not ask every time.
        if time.monotonic() - record.info.get("returned", math.inf) > FRESH_SECONDS:
            try:
                engine.dialect.do_ping(connection)
            except Exception as error:  # the pool makes a new connection then
                raise InvalidatePoolError from error

    return engine
