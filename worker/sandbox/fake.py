"""A sandbox without walls, for tests of what lies above: trusted programs as plain subprocesses, same contract."""

from worker.sandbox.base import Shape
from worker.sandbox.local import LocalSandbox


class FakeSandbox(LocalSandbox):
    """Runs what it is given right here. Never give it anything you would not run yourself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, walls=False)
