"""The transport of our Celery app: what it changes, for whom, and which details of kombu it relies on."""

import inspect
import json
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from celery import Celery
from kombu.transport import redis as theirs
from kombu.transport import virtual

from evalpool.worker.queue import publish, transport
from evalpool.worker.queue.celery import QUEUES, RUN, app
from evalpool.worker.queue.transport import Transport, unreadable
from tests.conftest import ROOT, answers, eventually, missing

NORMAL = "evalpool.normal"
UNDECODABLE = (
    b"garbage",
    b"\xff\xfe",
    b"[" * 100_000,
    b"1" * 5000,
    b'{"__type__": "decimal", "__value__": "x"}',
    b'{"__type__": [], "__value__": 1}',
)
NO_ENVELOPE = (b"{}", b"7", b'{"properties": 7}')
URLS = [
    "redis://localhost:6379/3",
    "rediss://localhost:6379/3",
    "redis+socket:///run/redis.sock?virtual_host=3",
    "redis://first:6379/3;redis://second:6379/3",
]


def test_importing_a_worker_does_not_change_kombu() -> None:
    code = (
        "from kombu.transport import redis, TRANSPORT_ALIASES as names\n"
        "before = redis.Transport.Channel, redis.Channel.Message, redis.Channel._brpop_read, dict(names)\n"
        "import evalpool.worker.queue.celery, evalpool.worker.queue.dead_letters, evalpool.worker.queue.tasks\n"
        "evalpool.worker.queue.celery.app.connection_for_read().transport\n"
        "assert before == (redis.Transport.Channel, redis.Channel.Message, redis.Channel._brpop_read, dict(names))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("url", URLS)
def test_every_connection_of_our_app_reads_with_our_transport(url: str) -> None:
    connection = app.connection_for_read(url)
    assert type(connection.transport) is Transport
    assert type(connection.clone().transport) is Transport
    connection.maybe_switch_next()
    assert type(connection.transport) is Transport


@pytest.mark.parametrize("url", URLS)
def test_apart_from_its_transport_a_connection_is_the_same_as_kombus(url: str) -> None:
    ours, usual = app.connection_for_read(url), kombu.Connection(url)
    for name in ("hostname", "port", "virtual_host", "userid", "password", "ssl", "uri_prefix", "transport_cls"):
        assert getattr(ours, name) == getattr(usual, name), name
    assert ours.as_uri() == usual.as_uri()
    assert ours.transport.driver_type == usual.transport.driver_type == "redis"  # what Celery and Flower ask for


def test_a_rediss_url_still_uses_tls() -> None:
    assert app.connection_for_read("rediss://localhost").ssl == {"ssl_cert_reqs": ssl.CERT_NONE}
    given = app.connection_for_read("rediss://localhost?ssl_cert_reqs=required").ssl
    assert given["ssl_cert_reqs"] == ssl.CERT_REQUIRED


def test_other_apps_and_other_brokers_are_not_affected() -> None:
    other = Celery("other", broker=URLS[0], set_as_current=False)
    assert type(other.connection_for_read().transport) is theirs.Transport
    assert type(app.connection_for_read("memory://").transport) is not Transport


@pytest.fixture(params=["port", "socket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The broker URL of a private Redis, on a port or on a Unix socket."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        missing("no redis-server or valkey-server here")
    assert binary is not None
    if request.param == "port":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        where, url = ["--port", port, "--bind", "127.0.0.1"], f"redis://127.0.0.1:{port}/0"
    else:
        path = tmp_path / "redis.sock"
        where, url = ["--port", "0", "--unixsocket", str(path)], f"redis+socket://{path}?virtual_host=0"
    process = subprocess.Popen([binary, *where, "--save", "", "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        with client(url) as asked:
            eventually(lambda: answers(asked))
        yield url
    finally:
        process.kill()
        process.wait()


def client(url: str) -> "redis.Redis":
    """A client of the same Redis that does not use kombu."""
    return redis.Redis.from_url(url.replace("redis+socket://", "unix://").partition("?")[0])


def read(connection: kombu.Connection, count: int, *, acknowledge: bool = True) -> list[Any]:
    """The bodies of so many messages of our queue."""
    found: list[Any] = []

    def hear(message: Any) -> None:
        found.append(message.body)
        if acknowledge:
            message.ack()

    with kombu.Consumer(connection, [kombu.Queue(NORMAL)], on_message=hear, accept=["json"]):
        while len(found) < count:
            connection.drain_events(timeout=30)
    return found


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """The bodies that were reported as unreadable."""
    bodies: list[Any] = []

    def hear(body: Any, **_: Any) -> None:
        bodies.append(body)

    unreadable.connect(hear)
    yield bodies
    unreadable.disconnect(hear)


@pytest.mark.redis
def test_an_undecodable_message_is_reported_and_the_next_one_is_read(url: str, told: list[Any]) -> None:
    with client(url) as asked, app.connection_for_read(url) as connection:
        for garbage in UNDECODABLE + NO_ENVELOPE:
            asked.lpush(NORMAL, garbage)
        app.send_task(RUN, args=(["a-job"],), connection=connection, queue=NORMAL)
        *odd, last = read(connection, len(NO_ENVELOPE) + 1)
    assert len(told) == len(UNDECODABLE)
    assert told[:2] == ["garbage", "\ufffd\ufffd"]  # kombu replaces what is not UTF-8
    assert odd == [ascii({}), ascii(7), ascii({"properties": 7})]
    assert json.loads(last)[0] == [["a-job"]]


@pytest.mark.redis
@pytest.mark.parametrize("url", ["port"], indirect=True)
def test_an_error_of_the_consumer_is_not_taken_for_an_unreadable_message(url: str, told: list[Any]) -> None:
    def fail(message: Any) -> None:
        raise ValueError("ours")

    with app.connection_for_read(url) as connection:
        app.send_task(RUN, args=(["a-job"],), connection=connection, queue=NORMAL)
        consumer = kombu.Consumer(connection, [kombu.Queue(NORMAL)], on_message=fail, accept=["json"])
        with consumer, pytest.raises(ValueError, match="ours"):
            connection.drain_events(timeout=30)
    assert told == []


@pytest.mark.redis
def test_our_queues_are_plain_lists_and_unacknowledged_messages_are_in_a_hash(url: str) -> None:
    """`worker.queue.publish.wake` reads the length of a queue without kombu."""
    with client(url) as asked, app.connection_for_read(url) as connection:
        for name in QUEUES.values():
            app.send_task(RUN, connection=connection, queue=name)
        assert [asked.llen(name) for name in QUEUES.values()] == [1] * len(QUEUES)
        read(connection, 1, acknowledge=False)
        assert (asked.llen(NORMAL), asked.hlen("unacked")) == (0, 1)


@pytest.mark.redis
@pytest.mark.parametrize("url", ["port"], indirect=True)
def test_kombu_still_raises_the_error_that_we_catch(url: str) -> None:
    """If this fails, kombu handles such messages itself or reads them in another way: review our channel."""
    with client(url) as asked, kombu.Connection(url) as connection:
        asked.lpush(NORMAL, b"garbage")
        with pytest.raises(JSONDecodeError) as caught:
            read(connection, 1)
    assert "_brpop_read" in [entry.name for entry in caught.traceback]


def test_kombu_still_has_what_we_override() -> None:
    """If this fails after an update of kombu, kombu no longer calls our channel, or calls it in another way."""
    (_, options) = inspect.signature(theirs.Channel._brpop_read).parameters.values()
    assert options.kind is inspect.Parameter.VAR_KEYWORD
    _, payload, channel, *more = inspect.signature(theirs.Channel.Message.__init__).parameters.values()
    assert (payload.name, channel.name, channel.default) == ("payload", "channel", None)
    assert [each.kind for each in more] == [inspect.Parameter.VAR_KEYWORD]
    assert list(inspect.signature(theirs.Transport._deliver).parameters) == ["self", "message", "queue"]
    assert theirs.Channel.Message is virtual.Message
    assert theirs.Transport.Channel is theirs.Channel
    assert transport.Transport.Channel.Message is transport.Message
    with pytest.raises(TypeError):
        theirs.Channel.Message([], channel=None)  # such an error of its own is what we catch


def test_celery_still_takes_the_class_of_its_connections_from_its_amqp_class() -> None:
    assert app.amqp.Connection is transport.Connection
    assert Celery("plain", set_as_current=False).amqp.Connection is kombu.Connection


def test_a_channel_whose_connection_was_closed_raises_an_error_that_celery_recovers_from(redis_server: str) -> None:
    """Kombu requeues unacknowledged messages when a lost connection is closed, and Celery ignores only these errors."""
    connection = app.connection_for_read(redis_server)
    channel = connection.channel()
    channel.connection.client = None  # as `Connection.collect` leaves it
    with pytest.raises(connection.connection_errors):
        channel._connparams()


def test_a_wake_up_is_the_message_that_celery_itself_would_send(redis_url: str) -> None:
    app.send_task(RUN, argsrepr="('x')", queue=NORMAL, connection=app.connection_for_write(redis_url), retry=False)
    with redis.Redis.from_url(redis_url) as client:
        theirs_sent, ours = json.loads(client.rpop(NORMAL)), json.loads(publish.message("x", NORMAL))
        assert not client.llen(NORMAL)
        publish.wake(client, "x")
        publish.wake(client, "y")  # one waits already
        assert client.llen(NORMAL) == 1
    assert ours.keys() == theirs_sent.keys()
    assert ours["body"] == theirs_sent["body"]
    assert ours["headers"].keys() == theirs_sent["headers"].keys()
    own = ("id", "root_id", "origin", "ignore_result")
    same = {name: value for name, value in theirs_sent["headers"].items() if name not in own}
    assert same == {name: value for name, value in ours["headers"].items() if name not in own}
    assert theirs_sent["properties"].keys() - ours["properties"].keys() == {"argsrepr"}
    for name in ("delivery_mode", "delivery_info", "priority", "body_encoding"):
        assert ours["properties"][name] == theirs_sent["properties"][name]
