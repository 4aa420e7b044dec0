"""Celery and Redis: they wake workers, and notify callers of results."""
