"""The Celery app, and its settings with the reason for each."""

from celery import Celery
from kombu import Exchange, Queue

from evalpool.schemas.settings import settings
from evalpool.schemas.verdict import Priority

RUN = "evalpool.run"
"""The name of the only task. It has no arguments, since the ledger decides which jobs are run."""
QUEUES = {priority: f"evalpool.{priority.value}" for priority in Priority}
"""One named queue per priority: Redis' own priorities would hide the backlog from every tool that looks at it."""

app = Celery(
    "evalpool",
    amqp="evalpool.worker.queue.transport:AMQP",
    include=["evalpool.worker.queue.tasks", "evalpool.worker.queue.dead_letters"],
)
app.conf.update(
    broker_url=settings().broker_url,
    result_backend=None,  # the ledger is the result store
    task_ignore_result=True,
    task_acks_late=True,  # a busy worker holds no more messages than it has threads, as others may be free
    task_acks_on_failure_or_timeout=True,  # the ledger retries, not the queue: no poison message circles
    worker_prefetch_multiplier=1,  # hoarded messages would wait here while another worker is idle
    worker_pool="threads",  # the sandboxes do the work; threads only wait for them
    worker_concurrency=settings().slots + 1,  # one more than slots: the next jobs are claimed while these run
    worker_cancel_long_running_tasks_on_connection_loss=False,  # finishing is safe: results are upserts
    broker_connection_retry_on_startup=True,  # wait for Redis for ever, at the start and later
    broker_connection_max_retries=None,
    broker_pool_limit=settings().slots + 3,
    broker_transport_options={
        # A message not acknowledged for this long is delivered again: so comes back what a dead worker had fetched but
        # not begun. That a living one may still be at it does no harm: its jobs are leased, and it costs one query.
        "visibility_timeout": settings().visibility_seconds,
        "unacked_restore_interval": min(
            5, settings().visibility_seconds / 3
        ),  # with the next two: a dead worker's messages return in seconds, not minutes
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": max(2, min(30, int(settings().visibility_seconds))),
        "socket_timeout": settings().redis_timeout,  # a half-open connection must surface
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": max(1, min(10, settings().redis_timeout / 3)),
        "priority_steps": [0],  # one Redis list per queue
        "queue_order_strategy": "priority",  # the queues are read in the order given below
    },
    task_serializer="json",  # with pickle, whoever writes to Redis could run code in a worker
    accept_content=["json"],
    task_queues=[Queue(name, Exchange("evalpool"), routing_key=name) for name in QUEUES.values()],
    task_default_queue=QUEUES[Priority.NORMAL],
    task_create_missing_queues=False,  # a misspelt queue fails at once
    worker_send_task_events=False,  # events cost half the throughput, and the ledger knows better
    task_send_sent_event=False,
    worker_hijack_root_logger=False,  # our own logging
    worker_redirect_stdouts=False,
    enable_utc=True,
)
