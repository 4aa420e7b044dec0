"""The time of every operation of the store in a database with millions of rows, for which other operations wait.

The rows are made by bulk SQL, in a SQLite file and in a PostgreSQL server that is started for this. An operation is one
transaction or several. For each transaction, its slowest statement and its total time are shown.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, event, select, text

from evalpool.schemas import CaseResult, JobSpec, Metrics, Result, Verdict
from evalpool.schemas.database import Database, clock
from evalpool.schemas.fleet import Member
from evalpool.schemas.lease import Lease
from evalpool.schemas.rows import job_id, moment
from evalpool.schemas.store import PART, WHOLE, Store
from tests.faults.servers import PostgresServer

LIMIT_MS = 100.0
"""No statement may take longer, except in submissions and in queries that only people ask for."""
PARTS = 50
"""How many parts of the cancellation of the largest batch are timed."""
RARE = "rare:1"
"""The image of the first jobs in the queue, which a worker without this image has to pass over."""
DEFAULTS = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}
"""The settings of PostgreSQL as it is installed. The tests use faster ones."""
SPEC = JobSpec(code="def answer(n):\n    return n * n\n" * 10, check="assert answer(2) == 4\n" * 3).model_dump_json(
    exclude_defaults=True
)
FUTURE = '{"code": "", "field_of_the_future": 1}'

console = Console(stderr=True)


class Enough(Exception):  # noqa: N818 - it is not an error
    """Ends an operation after the number of transactions that are timed."""


@dataclass(frozen=True)
class Transaction:
    """The milliseconds of a transaction from its beginning to its commit, and those of its slowest statement."""

    ms: float
    statement_ms: float
    statement: str


class Timed(Database):
    """A database that measures its statements and transactions."""

    def __init__(self, url: str) -> None:
        self.statements: list[tuple[float, str]] = []
        """The statements of the current transaction: milliseconds and SQL."""
        self.transactions: list[Transaction] = []
        self.most: int | None = None
        super().__init__(url)
        event.listen(self.engine, "before_cursor_execute", self._before)
        event.listen(self.engine, "after_cursor_execute", self._after)

    def _before(self, connection: Connection, *_: Any) -> None:
        connection.info["began"] = time.perf_counter()

    def _after(self, connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        self.statements.append(((time.perf_counter() - connection.info["began"]) * 1000, statement))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._timed(), super().read() as connection:
            yield connection

    @contextmanager
    def glance(self) -> Iterator[Connection]:
        timed = self._timed() if self.engine.dialect.name == "postgresql" else nullcontext()  # SQLite reads as above
        with timed, super().glance() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.most is not None and len(self.transactions) >= self.most:
            raise Enough
        with self._timed(), super().write() as connection:
            yield connection

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self.statements.clear()
        began = time.perf_counter()
        yield
        slowest = max(self.statements, default=(0.0, ""))
        self.transactions.append(Transaction((time.perf_counter() - began) * 1000, *slowest))


class Ledger:
    """One database with all rows, and the operations that are timed in it."""

    def __init__(self, url: str, rows: int, older: int = 0) -> None:
        self.database, self.rows, self.older = Timed(url), rows, older
        self.store = Store(self.database)
        self.found: dict[str, list[Transaction]] = {}
        self.excepted: set[str] = set()

    # -- the rows ----------------------------------------------------------------------------------

    def build(self) -> None:
        """Create two large batches, one waiting and one finished, and thousands of jobs that run, are held, are twins
        or belong to another fleet."""
        with self.database.write() as db:
            now = db.scalar(select(clock())) or 0.0
            image = f"CASE WHEN i < {self.rows // 10} THEN '{RARE}' ELSE 'a:1' END"
            self._jobs(db, "waiting", self.rows, now, image=image)
            self._jobs(db, "private", self.rows // 10, now, fleet="'run-1'", rank="i - 1e6")  # ahead of all others
            self._jobs(db, "finished", self.rows, now, state="finished", digest="'d' || i", attempt=1)
            for number in range(self.older):
                self._jobs(db, f"older{number}", self.rows, now, state="finished", attempt=1)
            self._jobs(db, "running", 5000, now, state="running", attempt=1, worker="'w'", lease_until=now + 3600)
            self._jobs(db, "held", 5000, now, state="held", todo="'queueing'")
            leads = "(i % 1001) = 0"
            self._jobs(
                db, "twins", 5005, now, attempt=1, worker="'w'", lease_until=now + 3600,
                state=f"CASE WHEN {leads} THEN 'running' ELSE 'twin' END",
                twin_of=f"CASE WHEN {leads} THEN NULL ELSE {_id('twins', 'i - i % 1001')} END",
            )  # fmt: skip
            db.execute(
                text(
                    "INSERT INTO results (job_id, batch_id, verdict, exit_code, stdout, stderr, stdout_truncated, "
                    "stderr_truncated, detail, wall_seconds, cpu_seconds, peak_memory_bytes, oom_killed, "
                    "processes_peak, output_bytes, queue_seconds, setup_seconds, sandbox_uses, limit_share, rerun, "
                    "attempt, worker, size, finished_at) "
                    "SELECT id, batch_id, 'passed', 0, '', '', false, false, '', 0.1, 0.1, 9999999, false, 1, 0, 1, "
                    f"0.1, 1, 0.1, false, 1, 'w', 0, {now} FROM jobs WHERE state = 'finished'"
                )
            )
            db.execute(
                text(
                    "INSERT INTO tallies (batch_id, verdict, writer, count) "
                    "SELECT batch_id, verdict, 'w', count(*) FROM results GROUP BY batch_id, verdict"
                )
            )
        for number in range(50):
            self.store.report(_member(f"w{number}"))
        with self.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            # the server does this by itself sooner or later, and must not do it during the measurement
            db.execute(text("VACUUM ANALYZE" if db.dialect.name == "postgresql" else "ANALYZE"))
            if db.dialect.name == "postgresql":
                db.execute(text("CHECKPOINT"))

    def _jobs(self, db: Connection, batch: str, count: int, now: float, *, todo: str = "NULL", **columns: Any) -> None:
        """Insert a batch with `count` jobs. `columns` are SQL expressions over the place `i` that replace the
        defaults."""
        db.execute(
            text(f"INSERT INTO batches (id, total, created_at, todo) VALUES (:id, :total, :now, {todo})"),
            {"id": batch, "total": count, "now": now},
        )
        if columns.get("state", "").isalpha():
            columns["state"] = f"'{columns['state']}'"
        usual = {
            "id": _id(batch, "i"), "batch_id": f"'{batch}'", "seq": "i", "spec": ":spec", "priority": "'normal'",
            "rank": "1.0 + i", "state": "'queued'", "attempt": "0", "image": "'a:1'", "created_at": str(now),
        }  # fmt: skip
        values = usual | columns
        numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count)"
        selected = f"SELECT {', '.join(map(str, values.values()))} FROM n"
        if db.dialect.name == "postgresql":  # it does not know the type of a parameter in a SELECT
            selected = selected.replace(":spec", "CAST(:spec AS text)")
            numbers = "WITH n(i) AS (SELECT generate_series(0, :count - 1))"
        names = ", ".join(values)
        db.execute(text(f"INSERT INTO jobs ({names}) {numbers} {selected}"), {"spec": SPEC, "count": count})

    def change(self, command: str, **values: Any) -> None:
        """Run a statement that is not timed."""
        with self.database.engine.begin() as db:
            db.execute(text(command), values)

    # -- the times ---------------------------------------------------------------------------------

    def run(self, name: str, act: Callable[[], Any], *, excepted: bool = False) -> Any:
        """Run an operation, and keep the times of its transactions under this name."""
        self.database.transactions.clear()
        given = None
        with suppress(Enough):
            given = act()
        self.found.setdefault(name, []).extend(self.database.transactions)
        if excepted:
            self.excepted.add(name)
        return given

    def measure(self) -> None:
        """Time all operations, in an order in which none disturbs the next."""
        self._read()
        self._workers()
        self._leases()
        self._ends()
        self._submit()

    def _read(self) -> None:
        store = self.store
        page = [job_id("finished", self.rows // 2 + place) for place in range(100)]
        for _ in range(20):
            self.run("progress of the waiting million", lambda: store.progress("waiting"))
            self.run("progress of the finished million", lambda: store.progress("finished"))
            self.run("state of a job", lambda: store.state(page[0]))
            self.run("results of 100 jobs", lambda: list(store.results(page)))
            self.run("specs of 100 jobs", lambda: store.specs(page))
            self.run("known results of 100 digests", lambda: store.known([f"d{number}" for number in range(100)]))
            self.run("abandoned batches", store.abandoned)
            self.run("whether there is anything to do", store.pending)
        self.run("what the waiting million waits for", lambda: store.waiting("waiting"), excepted=True)
        self.run("ids of the finished million", lambda: store.done("finished"), excepted=True)
        self.run("report of the finished million, each part", lambda: sum(1 for _ in store.measures("finished")))

    def _workers(self) -> None:
        store = self.store
        for number in range(20):
            self.run("report of a worker", lambda: store.report(_member("w1")))
            self.run("the fleet", lambda: store.fleet(60))
            self.run("retire a worker", lambda: store.retire("nobody"))
            self.run("pin an image", lambda: store.pin("waiting", f"a:{number}", "sha256:1"))  # noqa: B023
            self.run("bury a message", lambda: store.bury("w", "of another version", "{}"))

    def _leases(self) -> None:
        store = self.store
        held: list[Lease] = []
        for _ in range(30):
            held += self.run("claim 32 jobs", lambda: store.claim(32, "w", 3600).leases)
            held += self.run(
                "claim 32 jobs, passing over a tenth of the queue",
                lambda: store.claim(32, "w", 3600, without={RARE}).leases,
            )
        for start in range(0, 1000, 100):
            some = held[start : start + 100]
            self.run("renew 100 leases", lambda: store.renew({each.job_id: each.attempt for each in some}, "w", 3600))  # noqa: B023
            self.run("record 100 results", lambda: store.record([_result(each) for each in some], "w"))  # noqa: B023
        for start in range(1000, 1500, 100):
            self.run("put 100 jobs back", lambda: store.put_back(held[start : start + 100], "w"))  # noqa: B023
        for lease in held[1500:1520]:
            self.run("release a job", lambda: store.release(lease, "w", "the container is gone", 5))  # noqa: B023
        for number in range(5):
            first = [job_id("waiting", self.rows - 1 - number * 32 - place) for place in range(32)]
            ids = ", ".join(f"'{each}'" for each in first)
            self.change(f"UPDATE jobs SET rank = -1, spec = :spec WHERE id IN ({ids})", spec=FUTURE)
            self.run("claim 32 jobs of another version", lambda: store.claim(32, "w", 3600, version="1"))

    def _ends(self) -> None:
        store = self.store
        for number in range(5):
            lead = job_id("twins", number * 1001)
            lease = Lease(job_id=lead, batch_id="twins", spec=JobSpec(code=""), attempt=1, created_at=1, started_at=1)
            self.run("record the result of 1,000 twins", lambda: store.record([_result(lease)], "w"))  # noqa: B023
        late = "UPDATE jobs SET lease_until = 0 WHERE batch_id = 'running' AND seq >= :start AND seq < :end"
        for number in range(10):
            self.change(late, start=number, end=number + 1)
            self.run("expire one lease", lambda: store.expire(3))
            self.run("expire nothing", lambda: store.expire(3))
        for number in (1, 2):
            self.change(late, start=number * 1000, end=number * 1000 + 1000)
            self.run("expire 1,000 leases", lambda: store.expire(3))
        for number in (3, 4):
            self.change(late, start=number * 1000, end=number * 1000 + 1000)
            self.run("expire 1,000 leases for the last time", lambda: store.expire(1))
        self.run("put a held batch into the queue, each part", lambda: store.finish("held"))
        self.database.most = PARTS
        self.run("cancel the waiting million, each part", lambda: store.cancel(batch_id="waiting"))
        self.database.most = None
        self.run("cancel one job", lambda: store.cancel(job_id=job_id("waiting", self.rows // 2)))

    def _submit(self) -> None:
        store, spec = self.store, JobSpec.model_validate_json(SPEC)
        for number in range(20):
            self.run("submit one job", lambda: store.add_batch(f"one{number}", [spec], None, None))  # noqa: B023
        for number in range(3):
            many = [spec] * WHOLE
            self.run(
                f"submit {WHOLE:,} jobs",
                lambda: store.add_batch(f"many{number}", many, None, None),  # noqa: B023
                excepted=True,
            )
            self.run(
                f"submit {2 * WHOLE:,} jobs, each part",
                lambda: store.add_batch(f"more{number}", many * 2, None, None),  # noqa: B023
                excepted=True,
            )


def _id(batch: str, place: str) -> str:
    """`rows.job_id` as an SQL expression."""
    return f"'{batch}-' || substr(CAST(1000000 + {place} AS text), 2)"


def _member(name: str) -> Member:
    images = {f"image{number}:1": f"sha256:{number:064}" for number in range(20)}
    return Member(name=name, images=images, digests=tuple(images.values()))


def _result(lease: Lease) -> Result:
    case = CaseResult(index=0, verdict=Verdict.PASSED, stdout="4\n" * 50, metrics=Metrics(cpu_seconds=0.1))
    return Result(
        job_id=lease.job_id, batch_id=lease.batch_id, verdict=Verdict.PASSED, cases=(case,), attempt=lease.attempt,
        worker="w", created_at=moment(lease.created_at), finished_at=moment(lease.now),
    )  # fmt: skip


def measured(kind: str, rows: int, older: int) -> Ledger:
    """Build and measure one of the databases."""
    with tempfile.TemporaryDirectory(prefix="evalpool-million-") as place:
        server = None
        url = f"sqlite:///{Path(place) / 'ledger.db'}"
        try:
            if kind == "postgresql":
                server = PostgresServer()
                server.start(**DEFAULTS)
                url = server.url("postgres").replace("postgresql://", "postgresql+psycopg://", 1)
            ledger = Ledger(url, rows, older)
            console.print(f"{kind}: making {(2 + older) * rows:,} jobs")
            ledger.build()
            console.print(f"{kind}: measuring")
            ledger.measure()
            ledger.database.close()
            return ledger
        finally:
            if server is not None:
                server.close()


def show(ledgers: dict[str, Ledger]) -> None:
    """Print the table, and the statements that take too long."""
    table = Table("milliseconds: p50 / max", box=ROUNDED, border_style="bright_black")
    for kind in ledgers:
        table.add_column(f"{kind}\nstatement", justify="right")
        table.add_column(f"{kind}\ntransaction", justify="right")
    slow = []
    for name in next(iter(ledgers.values())).found:
        cells = []
        for kind, ledger in ledgers.items():
            found = ledger.found[name]
            worst = max(found, key=lambda each: each.statement_ms)
            over = worst.statement_ms > LIMIT_MS and name not in ledger.excepted
            if over:
                slow.append(f"{kind}, {name}: {worst.statement_ms:.0f} ms: {' '.join(worst.statement.split())[:400]}")
            cells.append(_cell([each.statement_ms for each in found], over))
            cells.append(_cell([each.ms for each in found], False))
        table.add_row(name, *cells)
    Console(width=140).print(table)
    print(f"Times of the slowest statement of each transaction, and of the transaction. A part has {PART:,} jobs.")
    fine = (
        f"No statement took more than {LIMIT_MS:g} ms, except in submissions and in queries that only people ask for."
    )
    print("\n".join(slow) or fine)


def _cell(times: list[float], over: bool) -> str:
    cell = f"{statistics.median(times):.1f} / {max(times):.1f}"
    return f"[bold red]{cell} ![/]" if over else cell


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(prog="make million")
    options.add_argument("--rows", type=int, default=1_000_000, help="jobs in each of the two large batches")
    options.add_argument("--older", type=int, default=0, help="further finished batches of the same size")
    options.add_argument("--database", choices=["sqlite", "postgresql"], help="measure only this database")
    chosen = options.parse_args()
    kinds = [chosen.database] if chosen.database else ["sqlite", "postgresql"]
    show({kind: measured(kind, chosen.rows, chosen.older) for kind in kinds})


if __name__ == "__main__":
    main()
