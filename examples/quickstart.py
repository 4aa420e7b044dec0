"""Runs one program and prints its verdict. It needs a Redis and a worker: `evalpool worker`."""

from evalpool import submit_job

job = submit_job(code="print(sum(map(int, input().split())))", stdin="19 23")
result = job.result(timeout=60)

print(f"{result.verdict}: {result.detail}")
print(f"stdout:  {result.stdout!r}")
print(f"CPU:     {result.metrics.cpu_seconds * 1000:.1f} ms")
print(f"wall:    {result.metrics.wall_seconds * 1000:.1f} ms")
print(f"memory:  {result.metrics.peak_memory_bytes / (1 << 20):.1f} MiB")
print(f"waited:  {result.metrics.queue_seconds * 1000:.1f} ms")
