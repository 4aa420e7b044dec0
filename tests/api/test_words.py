"""Errors of a caller are reported in a sentence of ours that names the field, not with a message of a library."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalpool.api import BatchHandle, Job, get_batch, get_job, submit_batch, submit_job
from evalpool.schemas import EvalpoolError, JobSpec
from evalpool.schemas.errors import DatabaseUnavailable, SetupError
from evalpool.schemas.store import Store

SPEC = JobSpec(code="x")
WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: get_batch(BatchHandle("b")),
        "batch_id: it must be the id of a batch, not BatchHandle; a handle",
    ),
    (lambda: get_job(Job("b-000000")), "job_id: it must be the id of a job, not Job; a handle has its id in .id"),
    (lambda: get_job(None), "job_id: it must be the id of a job, not NoneType"),
    (lambda: get_batch(7), "batch_id: it must be the id of a batch, not int"),
    (lambda: get_batch("a\0b"), "no batch 'a\\x00b'"),
    (lambda: get_job("\ud800"), "no job '\\ud800'"),
    (lambda: submit_batch(SPEC), "jobs: it must be a list of jobs; submit_job takes a single one"),
    (lambda: submit_batch({"code": "x"}), "jobs: it must be a list of jobs; submit_job takes a single one"),
    (lambda: submit_batch("print(1)"), "jobs: it must be a list of jobs, not str"),
    (lambda: submit_batch(7), "jobs: it must be a list of jobs, not int"),
    (lambda: submit_batch(["print(1)"]), "job 0: it must be a JobSpec or a mapping of its fields, not str"),
    (lambda: submit_batch([SPEC], name=7), "name: it must be text, not int"),
    (lambda: submit_batch([SPEC], idempotency_key=b"k"), "idempotency_key: it must be text, not bytes"),
    (lambda: submit_job("print(1)"), "job: it must be a JobSpec or a mapping of its fields, not str; to submit"),
    (lambda: submit_job(SPEC).result(timeout="5"), "timeout: it must be a number of seconds, not '5'"),
    (lambda: submit_job(SPEC).result(timeout=float("nan")), "timeout: it must be a number of seconds, not nan"),
    (lambda: submit_batch([SPEC]).wait("soon"), "timeout: it must be a number of seconds, not 'soon'"),
    (lambda: list(submit_batch([SPEC]).as_completed([])), "timeout: it must be a number of seconds, not []"),
    (lambda: submit_batch([SPEC]).report(k=10), "k: it must be a list of positive whole numbers, not 10"),
    (lambda: submit_batch([SPEC]).report(k=(1, 0)), "k: it must be a list of positive whole numbers, not (1, 0)"),
    (lambda: submit_batch([SPEC]).report(k="10"), "k: it must be a list of positive whole numbers, not '10'"),
]


@pytest.mark.redis
@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[each[1] for each in WRONG])
def test_a_wrong_argument_is_refused_in_a_sentence(
    store: Store, redis_url: str, call: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(EvalpoolError) as raised:
        call()
    assert sentence in str(raised.value)


@pytest.mark.redis
def test_a_database_that_fails_is_reported_in_a_sentence_without_the_statement(
    store: Store, redis_url: str, tmp_path: Path
) -> None:
    batch = submit_batch([SPEC])
    with sqlite3.connect(tmp_path / "ledger.db") as other:
        other.execute("DROP TABLE tallies")
    other.close()
    for call in (batch.progress, lambda: batch.wait(timeout=1), lambda: asyncio.run(_awaited(batch))):
        with pytest.raises(DatabaseUnavailable) as raised:
            call()
        assert str(raised.value).startswith("the database failed: no such table: tallies")
        assert "SELECT" not in str(raised.value)


async def _awaited(batch: BatchHandle) -> Any:
    return await batch


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://me:secret@127.0.0.1:1/x", "does not answer: connection"),
        ("sqlite:////proc/version", "does not answer: unable to open database file"),
    ],
)
def test_a_database_that_cannot_be_opened_is_reported_in_a_sentence(
    url: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_DATABASE_URL", url)
    with pytest.raises(SetupError) as raised:
        submit_job(code="x")
    told = str(raised.value)
    assert sentence in told
    assert "EVALPOOL_DATABASE_URL" in told
    assert not any(word in told for word in ("secret", "sqlalche.me", "psycopg.", "sqlite3."))
