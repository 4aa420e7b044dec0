"""The types of sandbox without Docker: processes of this machine, and a fake for tests."""

import logging
import os
import sys

from evalpool.api.sandbox.box import BoxSandbox
from evalpool.api.sandbox.factory import register_sandbox
from evalpool.schemas.sandbox import SandboxType
from evalpool.worker.sandbox.base import Box
from evalpool.worker.sandbox.fake import FakeBox
from evalpool.worker.sandbox.local import LocalBox
from evalpool.worker.sandbox.walls import bubblewrap

log = logging.getLogger("evalpool.sandbox")


@register_sandbox(SandboxType.LOCAL_PROCESS)
class LocalProcessSandbox(BoxSandbox):
    """Processes of this machine, for machines without Docker. It is only used if it is asked for by name."""

    @property
    def sandbox_type(self) -> str:
        return SandboxType.LOCAL_PROCESS

    async def _make(self) -> Box:
        walls = bubblewrap() is not None
        if not walls:
            message = (
                "LOCAL_PROCESS without bubblewrap: commands run as your own user, with your files and your network. "
                "Run only what you trust, or install bubblewrap (Debian: apt-get install bubblewrap)."
            )
            log.warning(message, extra={"sandbox": self.id, "action": "no_walls"})
            print(f"evalpool: WARNING: {message}", file=sys.stderr)  # noqa: T201 - loud, whatever logging is set to
        self.metadata |= {"walls": "bubblewrap" if walls else "none", "pid": os.getpid()}
        box = LocalBox(self.shape, walls=walls)
        await box.start()
        return box


@register_sandbox(SandboxType.DUMMY)
class DummySandbox(BoxSandbox):
    """A fake without any isolation, for tests."""

    keeps_tmp = True

    @property
    def sandbox_type(self) -> str:
        return SandboxType.DUMMY

    async def _make(self) -> Box:
        box = FakeBox(self.shape)
        await box.start()
        return box
