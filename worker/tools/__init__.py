"""What can be executed in a sandbox, and how its outcome is judged."""

from worker.tools import code as code  # each registers its tools
from worker.tools import files as files
from worker.tools import notebook as notebook
