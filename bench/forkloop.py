"""The physical limit: a warm interpreter that forks, runs a program in the child, and waits for it.

This is a program of its own. Its arguments are modules to import; each line of standard input is a JSON list of
programs. It prints "warm" when it is ready and "done" after each list, and fails if a program fails.
"""

import gc
import importlib
import json
import os
import sys


def main() -> None:
    """Run each program in a fork, one after another."""
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
