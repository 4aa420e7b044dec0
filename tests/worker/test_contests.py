"""Contest problems with full tests in real containers: every solution gets its known verdict at the time limit."""

import pytest

from evalpool.schemas import JobSpec, Limits
from tests.worker.conftest import Parts, evaluated
from tests.worker.contests import PROBLEMS

pytestmark = pytest.mark.docker

LIMITS = Limits(cpu_seconds=2, wall_seconds=600, memory_mib=256, output_bytes=2 << 20)
"""The limits of every problem. Wall time is not what is tested, so its limit leaves room for a busy machine."""


@pytest.mark.parametrize("language", ["cpp", "java", "python"])
@pytest.mark.parametrize("name", PROBLEMS)
async def test_solutions_get_the_known_verdict(worker_parts: Parts, name: str, language: str) -> None:
    problem = PROBLEMS[name]
    cases = problem.made()
    assert 20 <= len(cases) <= 60
    assert 1 << 19 < max(len(case.stdin) for case in cases) < 3 << 19
    verdicts = {}
    for (written, deserved), code in problem.solutions.items():
        if written == language:
            result = await evaluated(
                worker_parts,
                JobSpec(code=code, tool="multi_code_executor", language=language, cases=cases, limits=LIMITS),
            )
            verdicts[deserved] = result.verdict.value, result.detail
    assert {deserved: verdict for deserved, (verdict, _) in verdicts.items()} == {
        deserved: deserved for deserved in ("passed", "wrong_answer", "time_limit")
    }, verdicts
