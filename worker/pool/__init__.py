"""The warm sandboxes of one worker."""

from worker.pool.pool import Pool, PoolClosed

__all__ = ["Pool", "PoolClosed"]
