"""Outputs of programs are stored once, compressed, and read in parts that fit into memory."""

import random

import pytest
from sqlalchemy import text

from evalpool.schemas import Case, CaseResult, JobSpec, Verdict, views
from evalpool.schemas.packing import LONG, MARK, pack, unpack
from evalpool.schemas.store import Store
from tests.schemas.test_store import result

NOISE = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789é", k=3 * LONG))


@pytest.mark.parametrize(
    "given", ["", "short", "x" * LONG, "é\n" * LONG, NOISE, MARK, MARK + "x" * LONG, MARK + "AAAA", "\x01"]
)
def test_a_text_is_read_exactly_as_it_was_stored(store: Store, given: str) -> None:
    store.add_batch("b", [JobSpec(code="x")], None, None)
    (lease,) = store.claim(1, "w", 60).leases
    store.record([result(lease, stdout=given, stderr=given)])
    (back,) = store.batch_results("b")
    assert (back.stdout, back.stderr) == (given, given)


def test_a_long_text_is_compressed_and_a_short_one_is_stored_as_it_is() -> None:
    assert len(pack("the same line\n" * 10_000)) < 5000
    assert pack("a short line") == "a short line"
    assert unpack(f"{MARK}text of an older version") == f"{MARK}text of an older version"


def test_the_database_holds_long_outputs_compressed(store: Store) -> None:
    store.add_batch("b", [JobSpec(code="x")] * 2, None, None)
    store.record([result(lease, stdout="the same line\n" * 10_000) for lease in store.claim(2, "w", 60).leases])
    with store.database.read() as db:
        stored = db.scalars(text("SELECT stdout FROM results")).all()
    assert [each.startswith(MARK) and len(each) < 5000 for each in stored] == [True, True]


def test_the_output_of_the_decisive_case_is_stored_once(store: Store) -> None:
    store.add_batch("b", [JobSpec(code="x", cases=[Case("", ""), Case("", "")])], None, None)
    (lease,) = store.claim(1, "w", 60).leases
    cases = [CaseResult(index=n, verdict=Verdict.PASSED, stdout=f"{n}" * 100) for n in range(2)]
    given = result(lease, cases=tuple(cases), stdout="1" * 100)
    store.record([given])
    with store.database.read() as db:
        assert db.execute(text("SELECT stdout, decisive, size FROM results")).one() == ("", 1, 300)
    assert next(store.results([lease.job_id])) == [given]


def test_large_results_are_read_a_few_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "AT_ONCE", 250)
    store.add_batch("b", [JobSpec(code="x")] * 6, None, None)
    leases = store.claim(9, "w", 60).leases
    sizes = [100, 100, 100, 1000, 10, 10]
    store.record([result(lease, stdout="x" * size) for lease, size in zip(leases, sizes, strict=True)])
    parts = list(store.results([lease.job_id for lease in leases]))
    assert [[len(each.stdout) for each in part] for part in parts] == [[100, 100], [100], [1000], [10, 10]]
    assert [each.job_id for each in store.batch_results("b")] == [lease.job_id for lease in leases]
