"""Conversions between values and rows: a spec becomes a row, and a row becomes a result."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from evalpool.schemas.job import JobSpec
from evalpool.schemas.lease import Lease
from evalpool.schemas.packing import unpack
from evalpool.schemas.result import CaseResult, Metrics, Result
from evalpool.schemas.tables import Ran
from evalpool.schemas.verdict import Priority, State, Verdict

HEAD_START = {Priority.HIGH: -32.0, Priority.NORMAL: 0.0, Priority.LOW: 32.0}
"""How many turns (fair share) a priority is ahead of normal, if negative, or behind it."""
STRIDE = {Priority.HIGH: 1 / 16, Priority.NORMAL: 1.0, Priority.LOW: 16.0}
"""Turns from one job of a batch to the next. Sixteen jobs of a priority run for one of the next lower priority, so that
none is starved."""

IDS_AT_ONCE = 5000
"""The most ids in one statement. SQLite accepts at most 32,766 variables."""

JOB_COLUMNS = (
    "id", "batch_id", "seq", "spec", "task_id", "sample_id", "labels", "priority", "rank", "state", "attempt",
    "created_at", "twin_of", "digest", "image", "fleet",
)  # fmt: skip
"""The columns of a new job; the others are empty."""

_METRICS = tuple(Metrics.model_fields)
_RAN = tuple(name for name in Ran.model_fields if name not in _METRICS and name != "verdict")


def job_id(batch_id: str, seq: int) -> str:
    """The id of a job, made of its batch and its place there, so that it is known before anything is stored."""
    return f"{batch_id}-{seq:06d}"


def batch_of(job: str) -> str:
    """The id of the batch that a job id belongs to."""
    return job.rpartition("-")[0]


def parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split ids into parts that fit into one statement."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        yield ids[start : start + IDS_AT_ONCE]


def rank(priority: Priority, turn: float, place: int) -> float:
    """The turn of the job at this place, from 0, of a submission. The n-th job gets the n-th turn from now on, so that
    submissions share the slots. A higher priority is a head start."""
    return turn + 1 + place * STRIDE[priority] + HEAD_START[priority]


def job_row(batch_id: str, seq: int, spec: JobSpec, turn: float, *, first: int = 0) -> dict[str, Any]:
    """The row of a new job; `first` is the place in the batch at which this submission began."""
    return {
        "id": job_id(batch_id, seq),
        "batch_id": batch_id,
        "seq": seq,
        "spec": spec.model_dump_json(exclude_defaults=True),
        "task_id": _dump(spec.task_id),
        "sample_id": _dump(spec.sample_id),
        "labels": _dump(spec.labels),
        "priority": spec.priority.value,
        "rank": rank(spec.priority, turn, seq - first),
        "state": State.QUEUED.value,
        "attempt": 0,
    }


def lease_of(row: Any) -> Lease:
    """The lease of a row of `jobs` that was just claimed. Raises `ValidationError` if this version cannot read the
    spec."""
    return Lease(
        job_id=row.id,
        batch_id=row.batch_id,
        image=row.image,
        digest=row.digest,
        spec=JobSpec.model_validate_json(row.spec),
        attempt=row.attempt,
        created_at=row.created_at,
        started_at=row.started_at,
        failures=tuple((row.failures or "").splitlines()),
    )


def result_row(result: Result) -> dict[str, Any]:
    """The row of a result. If a case has the same output, the output is stored only in the row of that case."""
    texts = (result.stdout, result.stderr)
    decisive = next((case.index for case in result.cases if (case.stdout, case.stderr) == texts), None)
    own = {} if decisive is None else {"stdout": "", "stderr": ""}
    return {
        "job_id": result.job_id,
        "batch_id": result.batch_id,
        **_ran_row(result),
        **own,
        "decisive": decisive,
        "size": size(result),
        "attempt": result.attempt,
        "worker": result.worker,
        "sandbox_id": result.sandbox_id,
        "image_digest": result.image_digest,
        "comparator": result.comparator,
        "shared_with": result.shared_with,
        "started_at": result.started_at and result.started_at.timestamp(),
        "finished_at": result.finished_at.timestamp(),
    }


def size(result: Result) -> int:
    """The characters of all outputs of a result."""
    own = len(result.stdout) + len(result.stderr)
    return own + sum(len(case.stdout) + len(case.stderr) for case in result.cases)


def case_rows(result: Result) -> list[dict[str, Any]]:
    """The rows of a result's cases."""
    return [{"job_id": result.job_id, "index": case.index, **_ran_row(case)} for case in result.cases]


def read(columns: Sequence[str], row: Iterable[Any]) -> dict[str, Any]:
    """A row of `results` or `cases` as the driver returned it, with long texts decompressed."""
    read = dict(zip(columns, row, strict=True))
    read["stdout"], read["stderr"] = unpack(read["stdout"]), unpack(read["stderr"])
    return read


def result_of(row: Mapping[str, Any], cases: Iterable[Mapping[str, Any]] = ()) -> Result:
    """The result of a row of `results` joined with its job, and of the rows of its cases."""
    runs = tuple(CaseResult(index=case["index"], **_ran(case)) for case in cases)
    decisive = next((run for run in runs if run.index == row["decisive"]), None)
    texts = {} if decisive is None else {"stdout": decisive.stdout, "stderr": decisive.stderr}
    return Result(
        job_id=row["job_id"],
        batch_id=row["batch_id"],
        task_id=_load(row["task_id"]),
        sample_id=_load(row["sample_id"]),
        labels=_load(row["labels"]),
        **_ran(row) | texts,
        cases=runs,
        attempt=row["attempt"],
        worker=row["worker"],
        sandbox_id=row["sandbox_id"],
        image_digest=row["image_digest"],
        comparator=row["comparator"],
        shared_with=row["shared_with"],
        created_at=moment(row["created_at"]),
        started_at=None if row["started_at"] is None else moment(row["started_at"]),
        finished_at=moment(row["finished_at"]),
    )


def moment(seconds: float) -> datetime:
    """Seconds since 1970 as an aware datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def _ran_row(ran: Result | CaseResult) -> dict[str, Any]:
    metrics = ran.metrics
    return {
        "verdict": ran.verdict.value,
        **{name: getattr(ran, name) for name in _RAN},
        **{name: getattr(metrics, name) for name in _METRICS},
    }


def _ran(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "verdict": Verdict(row["verdict"]),
        **{name: row[name] for name in _RAN},
        "metrics": Metrics(**{name: row[name] for name in _METRICS}),
    }


def _dump(value: object) -> str | None:
    return None if value is None else json.dumps(value)


def _load(text: str | None) -> Any:
    return None if text is None else json.loads(text)
