"""The tools that can be executed in a sandbox."""

from evalpool.worker.tools import code as code  # each module registers its tools
from evalpool.worker.tools import files as files
from evalpool.worker.tools import notebook as notebook
