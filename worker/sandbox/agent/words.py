"""The words that the agent, the programs it starts and the worker agree on.

This module imports nothing, since a cold interpreter is given its source as a part of one text.
"""

HOME = "/box"
"""The working directory of a job's program."""
MAIN, CHECK = f"{HOME}/main.py", f"{HOME}/check.py"
"""The files of a Python program and of its check, as tracebacks name them."""

# What the harness says in its report, a pipe that the program can write to as well. It is read from its beginning, so
# nobody can take back what was written before.
BORN = b"born "
"""The report's first word, written when the process is confined, before the program's first line. An end without this
word is a failure of ours."""
BEGUN = b"begun "
"""The program is about to run: from now on, nobody can say that it did not compile."""
READY = b"ready "
"""The program has run: only now is the check put into its pipe."""
CHECKED = b"checked "
"""The check ran to its end; the token that proves it follows."""
FULL = b"full"
"""Instead of a report: a command of a session was not started, because the sandbox has no process left."""
NOT_BORN = 125
"""Exit code of a child of the agent that could not become the program. A program may use it too, but that one was born.
"""
COLD = "python3"
"""The command that stands for a Python interpreter of the program's own, which runs the same harness. A program that
sets variables for the interpreter needs one."""

# What the worker asks for in a frame of a session; a frame without any of these is a job's program.
OPEN, CLOSE = "open", "close"
START, FEED, INTERRUPT, STOP = "start", "feed", "interrupt", "stop"
STDOUT, STDERR, SIDE = 1, 2, 3
"""The streams of a command, by their descriptors; the last one is for commands that asked for a channel beside their
output."""
