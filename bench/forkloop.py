"""The physical limit: a warm interpreter that forks, runs the program in the child, and waits. Nothing else.

Run as a program of its own: the names of modules to import, then programs on standard input as a JSON list. It answers
with one line when it is warm and one when it is done, and fails if a program does.
"""

import gc
import importlib
import json
import os
import sys


def main() -> None:
    """Fork, run, wait; for each program in turn."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    print("warm", flush=True)
    for line in sys.stdin:
        for script in json.loads(line):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    exec(compile(script, "main.py", "exec"), {"__name__": "__main__"})
                    code = 0
                finally:
                    os._exit(code)
            if os.waitpid(pid, 0)[1]:
                sys.exit("a program failed")
        print("done", flush=True)


main()
