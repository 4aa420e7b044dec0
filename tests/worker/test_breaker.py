"""The circuit breaker: open while a service is away, closed by itself when the service is back."""

import asyncio

import pytest

from evalpool.worker import breaker as module
from evalpool.worker.breaker import Breaker


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)


async def test_an_open_breaker_logs_why_and_closes_when_the_probe_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([OSError("first"), OSError("second"), None])

    async def probe() -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    breaker = Breaker("the engine", probe)
    assert breaker.state == "ok"
    await breaker.closed()
    breaker.trip("no answer")
    breaker.trip("no answer")
    assert "no answer" in breaker.state
    await asyncio.wait_for(breaker.closed(), 10)
    assert breaker.state == "ok"
    assert [record.action for record in caplog.records] == ["breaker_open", "breaker_closed"]  # type: ignore[attr-defined]


async def test_waiters_are_released_when_the_breaker_is_closed() -> None:
    async def never() -> None:
        raise OSError

    breaker = Breaker("the engine", never)
    breaker.trip("gone")
    waiting = asyncio.create_task(breaker.closed())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    breaker.close()
    await asyncio.wait_for(waiting, 10)


async def test_a_closed_breaker_cannot_be_tripped_again() -> None:
    """A failure while a worker stops must not keep it from stopping."""

    async def never() -> None:
        raise OSError

    breaker = Breaker("the database", never)
    breaker.close()
    breaker.trip("gone")
    await asyncio.wait_for(breaker.closed(), 10)
