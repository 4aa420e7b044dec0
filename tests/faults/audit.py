"""What must hold after any fault: every job has exactly one result, the right one, and no lease is left."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import text

from evalpool.schemas import Result, State, Verdict
from evalpool.schemas.rows import job_id
from evalpool.schemas.store import Store
from evalpool.schemas.verdict import FINAL
from tests.faults.jobs import Known

Expected = Mapping[str, Sequence[Known]]
"""Batch id → its jobs in the order of submission."""

ROWS = """
    SELECT j.id, j.batch_id, j.state, j.attempt, j.lease_until, r.job_id AS result_of, r.verdict, r.attempt AS made_by,
           r.shared_with
    FROM jobs j LEFT JOIN results r ON r.job_id = j.id ORDER BY j.batch_id, j.seq
"""
STRAY = "SELECT count(*) FROM results r LEFT JOIN jobs j ON j.id = r.job_id WHERE j.id IS NULL"
CASES = "SELECT c.job_id, count(*) FROM cases c GROUP BY c.job_id"


@dataclass
class Audit:
    """What the audit has found."""

    jobs: int = 0
    results: int = 0
    lost: list[str] = field(default_factory=list)
    """Jobs without a result."""
    double: list[str] = field(default_factory=list)
    """Jobs with more than one result, or with rows of more than one result."""
    wrong: list[str] = field(default_factory=list)
    """Jobs whose verdict or output is not the expected one."""
    other: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return all findings as sentences."""
        return [
            *(f"lost: {each}" for each in self.lost),
            *(f"double: {each}" for each in self.double),
            *(f"wrong: {each}" for each in self.wrong),
            *self.other,
        ]


def audit(
    store: Store,
    expected: Expected,
    *,
    attempts: int = 3,
    instead: Mapping[str, Collection[Verdict]] | None = None,
) -> Audit:
    """Check every row. `instead` has, by job id, the verdicts that a job may have instead of the expected one."""
    found = Audit()
    with store.database.read() as db:
        rows = db.execute(text(ROWS)).all()
        stray = db.execute(text(STRAY)).scalar_one()
        cases = {str(job): int(count) for job, count in db.execute(text(CASES))}
        found.results = db.execute(text("SELECT count(*) FROM results")).scalar_one()
        batches = {str(row.id): row.total for row in db.execute(text("SELECT id, total FROM batches"))}
    found.jobs = sum(len(jobs) for jobs in expected.values())
    if stray:
        found.double.append(f"{stray} results belong to no job")
    if set(batches) != set(expected):
        found.other.append(f"batches {sorted(set(batches) ^ set(expected))} are not the ones submitted")
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            found.double.append(row.id)
        seen.add(row.id)
        found.other += _row(row, attempts)
    found.lost = [row.id for row in rows if row.result_of is None]
    for batch_id, jobs in expected.items():
        _counts(store, batch_id, jobs, batches.get(batch_id), found)
        for index, (known, result) in enumerate(zip(jobs, store.batch_results(batch_id), strict=False)):
            if result.job_id != job_id(batch_id, index):
                break  # one is missing, as was said above: the rest would be compared with the wrong ones
            allowed = (instead or {}).get(result.job_id, (known.verdict,))
            found.wrong += _verdict(known, result, allowed)
            if cases.get(result.job_id, 0) != len(result.cases) or len(result.cases) > len(known.spec.cases):
                found.double.append(f"{result.job_id}: {cases.get(result.job_id, 0)} rows of cases")
    return found


def _row(row: object, attempts: int) -> list[str]:
    problems = []
    state, verdict = row.state, row.verdict and Verdict(row.verdict)  # type: ignore[attr-defined]
    if state not in FINAL or row.lease_until is not None:  # type: ignore[attr-defined]
        problems.append(f"{row.id}: state {state}, lease until {row.lease_until}")  # type: ignore[attr-defined]
    if verdict and State.after(verdict) != state:
        problems.append(f"{row.id}: {verdict}, but {state}")  # type: ignore[attr-defined]
    made_by = 0 if row.shared_with else row.made_by or 0  # type: ignore[attr-defined]
    if row.attempt > attempts or made_by > row.attempt:  # type: ignore[attr-defined]
        problems.append(f"{row.id}: attempt {row.attempt}, result of {row.made_by}")  # type: ignore[attr-defined]
    return problems


def _counts(store: Store, batch_id: str, jobs: Sequence[Known], total: int | None, found: Audit) -> None:
    progress = store.progress(batch_id)
    states = progress.queued + progress.running + progress.finished + progress.cancelled
    if not states == progress.total == total == len(jobs) == sum(progress.verdicts.values()):
        found.other.append(f"batch {batch_id} of {len(jobs)} jobs: total {total}, {progress}")


def _verdict(known: Known, result: Result, allowed: Collection[Verdict]) -> list[str]:
    if result.verdict not in allowed:
        return [f"{result.job_id}: {result.verdict} ({result.detail}) for {known.verdict}, attempt {result.attempt}"]
    if result.verdict is known.verdict and known.stdout is not None and result.stdout != known.stdout:
        return [f"{result.job_id}: printed {result.stdout!r} instead of {known.stdout!r}"]
    return []
