"""What a check relies on is found in its text, in bounded time and memory."""

import time
import tracemalloc

import pytest

from evalpool.worker.tools.guard import HEAD, MOST, SHORT, habits


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("assert f() == 1", ()),
        ("import math", ("math",)),
        ("import numpy as np\nnp.testing.assert_allclose(f(), 1)",
         ("numpy", "numpy.testing.assert_allclose", "numpy.testing")),
        ("import os.path", ("os.path",)),
        ("import a.b as c\nc.d()", ("a.b", "a.b.d")),
        ("from os import path", ("os", "os.path")),
        ("from a.b import (c as d,\n  e)\nd.f()", ("a.b", "a.b.c", "a.b.e", "a.b.c.f")),
        ("from math import *", ("math",)),
        ("from . import a", ()),
        ("import \\\n  math", ("math",)),
        ("if f(): import math", ("math",)),
        ("assert __import__('os').path.isabs('/')", ("os.path.isabs", "os.path", "os")),
        ("import importlib as i\ni.import_module('os.path').isabs('/')",
         ("importlib", "os.path.isabs", "os.path", "importlib.import_module")),
        ("import numpy\nt = numpy.testing\nt.assert_equal(1, 1)",
         ("numpy", "numpy.testing", "numpy.testing.assert_equal")),
        ("'import math'", ()),
        ("x = 1 # import math", ()),
        ("import math\nthis is no Python", ("math",)),
        ("import math\n" + "x = 1\n" * SHORT, ("math",)),
    ],
)  # fmt: skip
def test_the_names_that_a_check_reaches_are_found(check: str, found: tuple[str, ...]) -> None:
    assert sorted(habits(check).names) == sorted(found)


@pytest.mark.parametrize(
    ("check", "alone"),
    [
        ("assert f() == 1", True),
        ("import math\nx.y = 1\nmath.z == 1", True),
        ("import math\nmath.pi = 3", False),
        ("import numpy as np\nnp.random.seed = None", False),
        ("import math as m\ndel m.pi", False),
        ("import builtins\nbuiltins.input = f", False),
        ("builtins.input = f", False),
        ("from unittest.mock import patch", False),
        ("setattr(f, 'x', 1)", False),
        ("import math\nmath.pi = 3\n" + "x = 1\n" * SHORT, False),
    ],
)
def test_a_check_that_replaces_functions_itself_is_not_guarded(check: str, alone: bool) -> None:
    assert habits(check).guarded is alone


ODD = {
    "a long name": "import " + "a." * (SHORT // 2 - 10) + "a",
    "a long name with spaces": "import " + "a . " * (SHORT // 4 - 10) + "a",
    "a deep attribute": "import a\na" + ".a" * (SHORT // 2 - 10),
    "brackets": "import a\n" + "(" * (SHORT - 20),
    "signs": "import a\n" + "-" * (SHORT - 20) + "1",
    "words": "import a\n" + "not " * (SHORT // 4 - 10) + "1",
    "a long sum": "import a\nx = " + "a + " * (SHORT // 4 - 10) + "1",
    "statements": "import a\n" + "a\n" * (SHORT // 2 - 10),
    "calls": "import a\n" + "a()\n" * (SHORT // 4 - 10),
    "names": "import a\n" + "".join(f"a.b{n}\n" for n in range(SHORT // 10)),
    "a null": "import a\n\0",
    "many imports": "import a.b.c, d\n" * (1 << 20),
    "many lines": "import a\n" + "\n" * (16 << 20),
    "many colons": "import a\n" + ";:" * (8 << 20),
    "many words": "import " * (2 << 20),
    "many assignments": "import a\n" + "a.b.c.d " * (2 << 20),
    "one long line": "import a; x = '" + "x" * (16 << 20) + "'",
}


@pytest.mark.parametrize("name", ODD)
def test_a_check_of_any_text_is_read_with_bounded_memory(name: str) -> None:
    """Memory, which was quadratic, can be measured on any machine. Quadratic time for 16 MiB would be more than an
    hour."""
    began = time.process_time()
    tracemalloc.start()
    try:
        found = habits(ODD[name]).names
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) <= MOST
    assert sum(map(len, found)) < SHORT
    assert peak < 32 << 20
    assert time.process_time() - began < 20


def test_a_very_long_check_is_not_guarded_as_its_end_is_not_read() -> None:
    assert habits("import math\n" + "x = 1\n" * HEAD).guarded is False
