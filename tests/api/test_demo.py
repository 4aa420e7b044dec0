"""The last words of the demo."""

import pytest

from evalpool.api import BatchHandle
from evalpool.schemas import JobSpec
from evalpool.schemas.settings import settings
from evalpool.schemas.store import Store
from examples.demo import farewell
from tests.api.conftest import record


def test_the_demo_says_where_its_report_is_and_what_to_try_next(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_batch("b", [JobSpec(code="x")], "demo", None)
    record(store, ["b-000000"])
    farewell(BatchHandle("b"))
    said = capsys.readouterr().out
    page = settings().state_dir / "demo" / "report.html"
    assert str(page) in said
    assert "demo" in page.read_text()
    assert "evalpool report b" in said
    assert "evalpool run examples/bad_samples.jsonl" in said
