"""F6 to F13: a Redis that dies, forgets, fills up or answers slowly, and messages that are not ours."""

import base64
import json
import os
import signal
import time

import pytest

from evalpool.schemas import QueueUnavailable
from evalpool.schemas.store import Store
from evalpool.worker.queue.celery import RUN, app
from evalpool.worker.queue.publish import wake
from tests.conftest import PATIENCE, eventually
from tests.faults.fleet import Fleet
from tests.faults.jobs import mixed, quick, sleepers
from tests.faults.proxy import Proxy
from tests.faults.servers import PostgresServer, RedisServer

BOTH = pytest.mark.parametrize("ledger", ["sqlite", "postgresql"], indirect=True)
NORMAL = "evalpool.normal"


def test_f6_redis_is_killed_twice_and_restarted_with_its_file(fleet: Fleet, broker: RedisServer) -> None:
    worker = fleet.start()
    fleet.submit(mixed(60, seconds=0.15))
    for done in (5, 25):
        fleet.wait_done(done)
        broker.kill()
        broker.start()
    fleet.finish()
    assert fleet.workers == [worker]  # the same process, all along


def test_f7_redis_is_down(fleet: Fleet, broker: RedisServer) -> None:
    """The outage takes 4 seconds instead of a minute, as Celery retries after 2, 4, 6 … seconds."""
    worker = fleet.start()
    fleet.submit(mixed(20))
    fleet.wait_done(3)
    broker.kill()
    with pytest.raises(QueueUnavailable) as refused:
        fleet.submit(mixed(20))
    assert refused.value.batch_id in str(refused.value)
    assert fleet.store.progress(refused.value.batch_id).total == 20  # stored all the same, and some may run already
    time.sleep(4)
    assert worker.process.poll() is None
    broker.start()
    fleet.finish()


@BOTH
def test_f8_redis_is_emptied(fleet: Fleet, broker: RedisServer) -> None:
    fleet.start()
    fleet.submit(mixed(40, seconds=0.15))
    fleet.wait_done(10)
    broker.client.flushall()
    fleet.finish()


def test_f9_redis_is_full(fleet: Fleet, broker: RedisServer) -> None:
    """A supervisor restarts workers that have ended, as in any deployment."""
    fleet.start()
    fleet.submit(sleepers(20, 0.3))
    fleet.wait_done(4)
    broker.client.config_set("maxmemory", 1)
    with pytest.raises(QueueUnavailable):
        fleet.submit(quick(3))
    codes: list[int] = []
    end = time.monotonic() + 3
    fleet.wait_until("three seconds", lambda: _supervise(fleet, codes) and time.monotonic() > end)
    broker.client.config_set("maxmemory", 0)
    fleet.wait_until(
        "all is done, and somebody listens",
        lambda: _supervise(fleet, codes) and fleet.done() == fleet.total() and not broker.waiting() + broker.unacked(),
    )
    assert 0 not in codes  # whatever ended did not pretend that all was well
    fleet.finish()


def test_f9_a_worker_ends_when_redis_refuses_its_acknowledgements(fleet: Fleet, broker: RedisServer) -> None:
    """The refusal ends Celery. The running jobs finish, and later ones are left to other workers."""
    worker = fleet.start()
    running = fleet.submit(sleepers(2, 6))
    fleet.wait_until("both run", lambda: fleet.store.progress(running.id).running == 2)
    broker.client.execute_command("ACL", "SETUSER", "default", "-zrem")
    wake(broker.client, "to be acknowledged at once")
    fleet.wait_until("Celery ends", lambda: "Unrecoverable error" in worker.log.read_text())
    later = fleet.submit(sleepers(40, 0.1))
    assert worker.process.wait(PATIENCE) != 0
    assert fleet.store.progress(running.id).finished == 2
    assert fleet.store.progress(later.id).queued == 40
    broker.client.execute_command("ACL", "SETUSER", "default", "+zrem")
    fleet.start()
    fleet.finish()
    assert {*fleet.attempts(running).values(), *fleet.attempts(later).values()} == {1}


def test_f10_the_link_to_redis_is_slow_and_lossy(fleet: Fleet, redis_link: Proxy) -> None:
    fleet.start(EVALPOOL_REDIS_URL=redis_link.url)
    redis_link.delay, redis_link.loss = 0.1, 0.05  # there and back: 0.2
    fleet.submit(mixed(20))
    fleet.wait_done()
    redis_link.delay = redis_link.loss = 0.0
    fleet.finish()


def test_f11_the_link_to_redis_is_half_open(fleet: Fleet, redis_link: Proxy) -> None:
    """Every connection of the worker falls silent for ever, and neither end is told; new ones work. That is to be
    noticed within 90 seconds: here within a few, since the timeout is 5 and not 30 seconds."""
    fleet.start(EVALPOOL_REDIS_URL=redis_link.url)
    fleet.submit(mixed(20))
    fleet.wait_done()
    assert redis_link.blackhole() > 0
    fleet.submit(mixed(20))
    fleet.finish(90)


@BOTH
def test_f12_the_same_message_arrives_fifty_times(
    request: pytest.FixtureRequest, fleet: Fleet, broker: RedisServer, ledger: Store
) -> None:
    batch = fleet.submit(mixed(10))
    messages = broker.client.lrange(NORMAL, 0, -1)
    assert messages
    for _ in range(49):
        broker.client.rpush(NORMAL, *messages)
    fleet.start()
    fleet.wait_done()
    fleet.wait_until("all of them are read", lambda: not broker.waiting() and not broker.unacked())
    assert {result.attempt for result in ledger.batch_results(batch.id)} == {1}  # nothing was run twice
    fleet.finish()
    if ledger.database.engine.dialect.name == "postgresql":
        _cheap(fleet, broker, request.getfixturevalue("postgres"), messages)


def test_f13_messages_that_cannot_be_read_become_dead_letters(fleet: Fleet, broker: RedisServer) -> None:
    """Messages of another version, with unexpected arguments, without a body, of ten megabytes, or not even JSON."""
    worker = fleet.start(EVALPOOL_RECONCILE_SECONDS="0.3")
    fleet.submit(quick(1))
    fleet.wait_done()
    with app.connection_for_write(os.environ["EVALPOOL_REDIS_URL"]) as connection:
        for body in ({"version": 99}, "x", 7, None, [7], ["x" * 10_000_000], ["no-such-job-000001"] * 5000):
            app.send_task(RUN, args=(body,), connection=connection, queue=NORMAL)
        app.send_task(RUN, args=(), connection=connection, queue=NORMAL)
        app.send_task(RUN, args=([], 1, 2), kwargs={"a": 1}, connection=connection, queue=NORMAL)
        app.send_task("evalpool.of_tomorrow", args=([],), connection=connection, queue=NORMAL)
    fleet.submit(quick(5))
    fleet.wait_done()
    broken = json.loads(_envelope(broker))
    no_json = base64.b64encode(b"\x80no json").decode()
    for change in ({"body": "no base64!"}, {"body": no_json}, {"content-type": "x/y"}):
        broker.client.lpush(NORMAL, json.dumps(broken | change))
    broker.client.lpush(NORMAL, json.dumps(broken | {"headers": {}}))
    fleet.submit(quick(5))
    fleet.wait_done()
    assert worker.process.poll() is None
    fleet.finish()
    # Every bad message is kept. One without arguments is a wake-up, and so is a short list of ids of an older version.
    assert fleet.store.letters() == 6 + 1 + 1 + 4


def test_f13_messages_without_an_envelope_become_dead_letters(fleet: Fleet, broker: RedisServer) -> None:
    """Another program writes into our list."""
    worker = fleet.start()
    kinds = (b"garbage", b"{}", b"[]", b"7", b"\xff\xfe", b'{"properties": 7}', b"[" * 100_000, b"1" * 5000)
    for garbage in kinds:
        broker.client.lpush(NORMAL, garbage)
        fleet.submit(quick(3))
        fleet.wait_done()
    fleet.finish()
    assert fleet.workers == [worker]
    assert fleet.store.letters() == len(kinds)


def _envelope(broker: RedisServer) -> bytes:
    """A message as Celery makes it, taken from the queue again before anybody sees it."""
    with app.connection_for_write(broker.url) as connection:
        app.send_task(RUN, args=(["no-such-job-000001"],), connection=connection, queue="evalpool.low")
    message = broker.client.lpop("evalpool.low")
    if message is None:  # the worker was quicker
        return _envelope(broker)
    assert isinstance(message, bytes)
    return message


def _supervise(fleet: Fleet, codes: list[int]) -> bool:
    """Start a new worker if none runs, and note how the last one ended. Always true."""
    if not fleet.alive:
        codes.append(fleet.workers[-1].process.wait())
        fleet.start(ready=False)
    return True


def _cheap(fleet: Fleet, broker: RedisServer, postgres: PostgresServer, messages: list[bytes]) -> None:
    """A wake-up without jobs costs at most one query, and the ping of the connection before it."""
    worker = fleet.start(EVALPOOL_RECONCILE_SECONDS="3600")
    time.sleep(1.5)  # until its first look is over, and counted
    before = _transactions(postgres, fleet)
    for _ in range(100 // len(messages)):
        broker.client.rpush(NORMAL, *messages)
    pushed = 100 // len(messages) * len(messages)
    fleet.wait_until("all of them are read", lambda: not broker.waiting() and not broker.unacked())
    worker.stop(signal.SIGTERM)
    eventually(lambda: _transactions(postgres, fleet) > before, 5)
    assert _transactions(postgres, fleet) - before <= 2 * pushed + 40  # and what the server itself does meanwhile


def _transactions(postgres: PostgresServer, fleet: Fleet) -> int:
    name = fleet.store.database.url.database
    (row,) = postgres.execute(f"SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = '{name}'")
    return int(str(row[0]))
