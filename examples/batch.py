"""Evaluates several samples of two problems by cases, and prints results as they come. It needs a Redis and a worker:
`evalpool worker`."""

from rich.console import Console

from evalpool import Case, JobSpec, Limits, submit_batch
from evalpool.api.reports import summary

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
Console().print(summary.render(batch.report(k=(1, 2, 3))))
