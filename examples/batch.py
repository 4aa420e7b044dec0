"""Several samples of two problems, judged by cases, as they come in. Needs a Redis, and a worker: `evalpool worker`."""

from rich.console import Console

from api import reports, submit_batch
from schemas import Case, JobSpec, Limits

ADD = (Case("1 2", "3"), Case("-5 5", "0"), Case("10000000000 1", "10000000001"))
SORT = (Case("3 1 2", "1 2 3"), Case("7", "7"))

SAMPLES = [
    ("add", ADD, "print(sum(map(int, input().split())))"),
    ("add", ADD, "a, b = input().split(); print(a + b)"),
    ("add", ADD, "a, b = map(int, input().split()); print(a - -b)"),
    ("sort", SORT, "print(*sorted(map(int, input().split())))"),
    ("sort", SORT, "numbers = input().split()\nwhile numbers != sorted(numbers): numbers.append(0)"),
    ("sort", SORT, "print(*sorted(input()))"),
]

jobs = [
    JobSpec(code=code, cases=cases, task_id=task, limits=Limits(cpu_seconds=1, memory_mib=128))
    for task, cases, code in SAMPLES
]
batch = submit_batch(jobs, name="two problems")
for result in batch.as_completed(timeout=120):
    print(f"{result.task_id:5} {result.verdict:15} {result.detail}")
Console().print(reports.render(batch.report(k=(1, 2, 3))))
