"""Sandboxes that are processes of this machine."""

import logging
import os
import sys

from schemas.sandbox import SandboxType
from worker.library.box import BoxSandbox
from worker.library.factory import register_sandbox
from worker.sandbox.base import Sandbox as Box
from worker.sandbox.fake import FakeSandbox
from worker.sandbox.local import LocalSandbox, bubblewrap

log = logging.getLogger("evalpool.sandbox")


@register_sandbox(SandboxType.LOCAL_PROCESS)
class LocalProcessSandbox(BoxSandbox):
    """Processes of this machine, for where there is no Docker. Nobody gets it who does not ask for it by name."""

    @property
    def sandbox_type(self) -> str:
        return SandboxType.LOCAL_PROCESS

    async def _make(self) -> Box:
        walls = bubblewrap() is not None
        if not walls:
            message = (
                "LOCAL_PROCESS without bubblewrap: commands run as your own user, with your files and your network. "
                "Run only what you trust, or install it (Debian: apt-get install bubblewrap)."
            )
            log.warning(message, extra={"sandbox": self.id, "action": "no_walls"})
            print(f"evalpool: WARNING: {message}", file=sys.stderr)  # noqa: T201 - loud, whatever logging is set to
        self.metadata |= {"walls": "bubblewrap" if walls else "none", "pid": os.getpid()}
        box = LocalSandbox(self.shape, walls=walls)
        await box.start()
        return box


@register_sandbox(SandboxType.DUMMY)
class DummySandbox(BoxSandbox):
    """The fake that evalpool's own tests use: no walls at all."""

    keeps_tmp = True

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DUMMY

    async def _make(self) -> Box:
        box = FakeSandbox(self.shape)
        await box.start()
        return box
