"""Reads the agent's replies, of which nothing is trusted: a value that is not possible raises `ValueError`."""

from typing import Any

from evalpool.worker.sandbox.base import End


def ending(reply: dict[str, Any]) -> dict[str, Any]:
    """Return how a program or a command ended and what was counted of it; raise `ValueError` for impossible values."""
    return {
        "ended": End(reply["ended"]),
        "exit_code": small(reply, "exit_code"),
        "signal": small(reply, "signal"),
        "stdout_total": count(reply, "stdout_total"),
        "stderr_total": count(reply, "stderr_total"),
        "wall_seconds": seconds(reply, "wall_seconds"),
        "cpu_seconds": seconds(reply, "cpu_seconds"),
        "memory_bytes": count(reply, "memory_bytes"),
        "oom_kills": count(reply, "oom_kills"),
    }


def count(reply: dict[str, Any], name: str) -> int:
    """Return a number that the agent counted; raise `ValueError` if it is not possible."""
    value = reply[name]
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(name)
    return value


def small(reply: dict[str, Any], name: str) -> int | None:
    """Return an exit code or a signal, if there is one."""
    return None if reply[name] is None else count(reply, name) & 0xFF


def seconds(reply: dict[str, Any], name: str) -> float:
    """Return a time that the agent measured, in seconds; raise `ValueError` if it is not possible."""
    value = reply[name]
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise ValueError(name)
    return float(value)
