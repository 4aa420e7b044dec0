"""The image of a job is pinned when the job is submitted."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import evalpool.schemas.entries
from evalpool.api import connections, submit_batch, submit_job
from evalpool.api.embedded import Child, Servers
from evalpool.api.jobs import made_by, submit_stream
from evalpool.api.runs import _explain
from evalpool.api.waiting import reasons
from evalpool.schemas import IdempotencyConflict, JobSpec, Verdict
from evalpool.schemas.fleet import Fleet, Member, resolve
from evalpool.schemas.settings import Settings, settings
from evalpool.schemas.store import Store
from tests.api.conftest import record

pytestmark = pytest.mark.redis

IMAGE = Settings.model_fields["image"].default


@pytest.fixture(autouse=True)
def _always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FRESH", 0)


def worker(store: Store, digest: str = "sha256:1", *, image: str = IMAGE, name: str = "w", **more: str) -> None:
    images = {image: digest}
    defaults = {"image": image} if image != IMAGE else {}
    store.report(Member(name=name, images=images, digests=(digest,), defaults=defaults, **more))


def placed(store: Store) -> list[str | None]:
    return [lease.image for lease in store.claim(9, "w", 60).leases]


def test_the_image_is_pinned_by_the_digest_that_the_workers_have(store: Store, redis_url: str) -> None:
    worker(store)
    submit_job(code="x")
    submit_job(code="x", image="other")
    submit_stream([JobSpec(code="x")], 1)
    assert sorted(map(str, placed(store))) == [f"{IMAGE} sha256:1", f"{IMAGE} sha256:1", "other"]


def test_a_tag_that_is_moved_while_a_stream_is_submitted_does_not_change_its_image(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.api.jobs.PART", 2)

    def specs() -> Iterator[JobSpec]:
        for n in range(6):
            if n == 3:
                worker(store, "sha256:2")
            yield JobSpec(code=f"{n}")

    worker(store, "sha256:1")
    submit_stream(specs(), 6)
    assert set(placed(store)) == {f"{IMAGE} sha256:1"}


def test_a_large_batch_that_is_submitted_again_keeps_its_images(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpool.schemas.store.WHOLE", 2)
    monkeypatch.setattr("evalpool.schemas.store.PART", 2)
    add, calls = evalpool.schemas.entries.add, []

    def breaking(*args: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("cut off")
        add(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("evalpool.schemas.entries.add", breaking)
    jobs = [JobSpec(code=f"{n}") for n in range(6)]
    worker(store, "sha256:1")
    with pytest.raises(ConnectionError):
        submit_batch(jobs, idempotency_key="key")
    worker(store, "sha256:2")
    with pytest.raises(IdempotencyConflict):
        submit_batch([*jobs[:-1], JobSpec(code="other"), jobs[-1]], idempotency_key="key")
    with pytest.raises(IdempotencyConflict):
        submit_batch([JobSpec(code="other"), *jobs[1:]], idempotency_key="key")
    submit_batch(jobs, idempotency_key="key")
    assert placed(store) == [f"{IMAGE} sha256:1"] * 6


def test_without_a_worker_the_image_is_not_pinned(store: Store, redis_url: str) -> None:
    submit_job(code="x")
    assert placed(store) == [IMAGE]


def test_a_default_image_that_all_workers_share_is_used_for_jobs_that_name_none(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(store, image="house:1")
    submit_job(code="x")
    assert placed(store) == ["house:1 sha256:1"]
    monkeypatch.setenv("EVALPOOL_IMAGE", IMAGE)  # the submitter's own setting wins
    submit_job(code="x")
    assert placed(store) == [IMAGE]


def test_a_rebuilt_image_or_another_profile_does_not_reuse_old_results(store: Store, redis_url: str) -> None:
    def again() -> int:
        batch = submit_stream([JobSpec(code="x")], 1, dedup=True, cache=True)
        return batch.progress().done

    worker(store, "sha256:1", profile="warm")
    assert again() == 0
    record(store, [lease.job_id for lease in store.claim(9, "w", 60).leases])
    assert again() == 1
    worker(store, "sha256:2", profile="warm")
    assert again() == 0
    worker(store, "sha256:1", profile="cold")
    assert again() == 0
    worker(store, "sha256:1", profile="warm")
    assert again() == 1


def test_the_key_of_a_run_contains_everything_that_its_results_depend_on(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {made_by()}
    for setting, value in {
        "IMAGE": "a:1", "CODE_IMAGE": "b:1", "NOTEBOOK_IMAGE": "c:1", "PRELOAD": '["json"]', "INTERPRETER": "cold",
        "RUNTIME": "runsc",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"EVALPOOL_{setting}", value)
        keys.add(made_by())
    assert len(keys) == 7


def test_the_reason_is_given_for_jobs_that_no_worker_can_run(store: Store, redis_url: str) -> None:
    batch = submit_batch([{"code": "x"}, {"code": "x", "image": "other:1"}, {"code": "x", "image": "other:1"}])
    assert reasons(batch.id) == ["no worker is running"]
    worker(store)
    assert reasons(batch.id) == [
        "2 jobs wait for the image other:1, which no worker has; `docker pull other:1` fetches it from a registry"
    ]
    compiled = submit_batch([{"code": "int main() {}", "tool": "multi_code_executor", "language": "cpp"}])
    assert reasons(compiled.id) == [
        "1 job waits for the image evalpool/code:12, which no worker has; `evalpool images build code` builds it"
    ]
    pinned = submit_batch([{"code": "x"}])
    worker(store, "sha256:2")
    assert reasons(pinned.id) == [
        f"1 job waits for the image {IMAGE} (sha256:1…), which no worker has; {IMAGE} now refers to another image "
        "(sha256:2…)"
    ]
    record(store, [f"{pinned.id}-000000"], Verdict.PASSED)
    assert reasons(pinned.id) == []


def test_jobs_that_wait_for_a_private_run_say_so(store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(store)
    monkeypatch.setenv("EVALPOOL_FLEET", "run-1")
    batch = submit_batch([{"code": "x"}])
    assert reasons(batch.id) == ["no worker is running"]
    monkeypatch.delenv("EVALPOOL_FLEET")
    waits = "1 job waits for the `evalpool run` that submitted it, which has ended: run it again to resume"
    assert reasons(batch.id) == [waits]
    worker(store, name="its own", fleet="run-1")
    assert reasons(batch.id) == []


def test_a_private_run_takes_back_what_the_same_command_took_elsewhere(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALPOOL_FLEET", "run-1")
    batch = submit_batch([{"code": "x"}])
    monkeypatch.setenv("EVALPOOL_FLEET", "run-2")
    worker(store, fleet="run-2")
    process = subprocess.Popen(["true"])
    _explain(batch, Servers(settings(), [Child("worker", process, Path("log"))]))
    process.wait()
    assert [lease.job_id for lease in Store(store.database, "run-2").claim(9, "w", 60).leases]


def test_an_image_is_pinned_to_the_digest_that_most_workers_have() -> None:
    fleet = Fleet(members=tuple(Member(name=f"{n}", images={"a:1": f"sha256:{n % 3 > 0}"}) for n in range(3)))
    assert fleet.pin("a:1") == "a:1 sha256:True"
    assert Fleet().pin("a:1") == "a:1"


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("a:1", "sha256:1"), ("a", None), ("b", "sha256:2"), ("host:5000/c", "sha256:3"), ("sha256:1", "sha256:1"),
        ("a@sha256:9", "sha256:1"), ("d:1", None),
    ],
)  # fmt: skip
def test_an_image_name_may_lack_a_tag_or_be_a_digest(name: str, digest: str | None) -> None:
    known = {"a:1": "sha256:1", "b:latest": "sha256:2", "host:5000/c:latest": "sha256:3", "a@sha256:9": "sha256:1"}
    assert resolve(name, known) == digest
