"""A sandbox without walls, for tests of the layers above: the same contract, and programs are plain processes."""

from evalpool.worker.sandbox.base import Shape
from evalpool.worker.sandbox.local import LocalBox


class FakeBox(LocalBox):
    """Runs programs on this machine, unconfined. Never give it a program that you would not run yourself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, walls=False)
