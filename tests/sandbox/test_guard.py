"""A check gets its tools as they were before the program, and a program that tampers with them does not pass."""

import ast
import inspect
from collections import Counter

import pytest

from evalpool.schemas import JobSpec, Verdict
from evalpool.worker.judge.judge import judge
from evalpool.worker.sandbox.agent import explanation, interpreter, snapshot
from evalpool.worker.sandbox.docker import DockerBox
from evalpool.worker.tools.registry import TOOLS

pytestmark = pytest.mark.docker

# ruff: noqa: E501 - programs are data

F = "\ndef f():\n    return 1\n"
NUMPY = "import numpy as np\nimport numpy.testing\n"
ANYTHING = "lambda *_, **__: True"

BEFORE = {
    "a submodule": (f"{NUMPY}np.testing.assert_allclose = {ANYTHING}", "import numpy as np\nnp.testing.assert_allclose(f(), 2)"),
    "a submodule by from": (f"{NUMPY}np.testing.assert_allclose = {ANYTHING}", "from numpy import testing\ntesting.assert_allclose(f(), 2)"),
    "a function by from": (f"{NUMPY}np.testing.assert_allclose = {ANYTHING}", "from numpy.testing import (\n  assert_allclose as close)\nclose(f(), 2)"),
    "a submodule by another name": (f"{NUMPY}np.testing.assert_allclose = {ANYTHING}", "import numpy.testing as t\nt.assert_allclose(f(), 2)"),
    "os.path": (f"import os\nos.path.isabs = {ANYTHING}", "import os\nassert os.path.isabs(str(f()))"),
    "path of os": (f"import os\nos.path.isabs = {ANYTHING}", "from os import path\nassert path.isabs(str(f()))"),
    "a replaced submodule": (f"import os, types\nos.path = types.SimpleNamespace(isabs={ANYTHING})", "import os\nassert os.path.isabs(str(f()))"),
    "a call of __import__": (f"import math\nmath.isclose = {ANYTHING}", "assert __import__('math').isclose(f(), 2)"),
    "a named call of __import__": (f"import math\nmath.isclose = {ANYTHING}", "m = __import__('math')\nassert m.isclose(f(), 2)"),
    "a call of import_module": (f"import os\nos.path.isabs = {ANYTHING}", "import importlib\np = importlib.import_module('os.path')\nassert p.isabs(str(f()))"),
    "a continued line": (f"import math\nmath.isclose = {ANYTHING}", "import \\\n  math\nassert math.isclose(f(), 2)"),
    "a continued from": (f"import math\nmath.isclose = {ANYTHING}", "from math \\\n  import isclose\nassert isclose(f(), 2)"),
    "an import in a function": (f"import math\nmath.isclose = {ANYTHING}", "def check(g):\n    if True: import math\n    assert math.isclose(g(), 2)\ncheck(f)"),
    "an import in a large check": (f"import math\nmath.isclose = {ANYTHING}", f"import math\nx = '{'x' * 300_000}'\nassert math.isclose(f(), 2)"),
    "defaults": ("import numpy.testing as t\nt.assert_allclose.__defaults__ = (9.0, 9.0, True, '', True)", "import numpy.testing as t\nt.assert_allclose(f(), 2)"),
    "keyword defaults": ("import statistics as s, textwrap as t\nt.shorten.__kwdefaults__ = {}\nimport heapq\nheapq.nsmallest.__defaults__ = (lambda x: -x,)", "import heapq\nassert heapq.nsmallest(1, [f(), 2]) == [2]"),
    "keyword defaults in place": ("import bisect, dataclasses as d\nd.dataclass.__kwdefaults__['eq'] = False", "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nassert A(f()) != A(1)"),
    "a wrapped function": (f"import numpy as np\nnp.allclose.__wrapped__.__code__ = ({ANYTHING}).__code__", "import numpy as np\nassert np.allclose(f(), 2)"),
    "the class of a module": (f"import math, types\nclass Fake(types.ModuleType):\n    def __getattribute__(self, name): return {ANYTHING}\nmath.__class__ = Fake", "import math\nassert math.isclose(f(), 2)"),
    "a method of a class": (f"import collections\ncollections.Counter.__eq__ = {ANYTHING}", "from collections import Counter\nassert Counter([f()]) == Counter([2])"),
    "a new method of a class": (f"import collections\ncollections.ChainMap.__eq__ = {ANYTHING}", "import collections\nassert collections.ChainMap({1: f()}) == collections.ChainMap({1: 2})"),
    "a method of a base": (f"import unittest\nunittest.TestCase.assertEqual = {ANYTHING}", "import unittest\nclass T(unittest.TestCase):\n    def runTest(self): self.assertEqual(f(), 2)\nT().runTest()"),
    "the bases of a class": (f"import unittest\nclass B:\n    assertEqual = {ANYTHING}\nclass C(unittest.TestCase, B): assertEqual = B.assertEqual\nunittest.FunctionTestCase.__bases__ = (C,)", "import unittest\nclass T(unittest.FunctionTestCase):\n    pass\nT(print).assertEqual(f(), 2)"),
    "the import machinery": (f"import importlib._bootstrap as b, types\nb._handle_fromlist = lambda *_: types.SimpleNamespace(assert_allclose={ANYTHING})", "from numpy.testing import assert_allclose\nassert_allclose(f(), 2)"),
    "the finders": (f"import sys, types\nsys.modules.pop('statistics', None)\nclass Finder:\n    def find_spec(self, name, *_):\n        if name == 'statistics': sys.modules[name] = types.SimpleNamespace(mean={ANYTHING})\nsys.meta_path.insert(0, Finder())", "import statistics\nassert statistics.mean([f()]) == 2"),
    "a builtin that a class's methods use": (f"import collections\ncollections.all = {ANYTHING}", "from collections import Counter\nassert Counter([f()]) == Counter([2])"),
    "a builtin that a function uses": ("import statistics\nstatistics.sorted = lambda _: [2]\nstatistics.len = lambda _: 1", "import statistics\nassert statistics.median([f()]) == 2"),
    "a builtin in the module of a function": (f"{NUMPY}vars(np.testing)['assert_equal'].__globals__['isinstance'] = {ANYTHING}\nvars(np.testing)['assert_equal'].__globals__['len'] = lambda _: 0", "from numpy.testing import assert_equal\nassert_equal([f()], [2])"),
    "the builtins of a module": ("import builtins, statistics\nstatistics.__builtins__ = {**vars(builtins), 'enumerate': lambda *_, **__: [(1, 2)]}", "import statistics\nassert statistics.fmean(iter([f()])) == 2"),
    "a closure": ("from fractions import Fraction\nfor cell in Fraction.__sub__.__closure__:\n    if callable(cell.cell_contents): cell.cell_contents = lambda *_: Fraction(0)", "from fractions import Fraction\nassert abs(Fraction(f()) - Fraction(2)) == 0"),
    "the getter of a property": ("from fractions import Fraction\nFraction.numerator.fget.__code__ = (lambda a: 2).__code__", "from fractions import Fraction\nassert Fraction(f()).numerator == 2"),
    "the function of a cached property": ("import ipaddress\nipaddress.IPv4Network.broadcast_address.func = lambda _: 2", "from ipaddress import IPv4Network\nassert IPv4Network(f()).broadcast_address == 2"),
    "the code of a cached property": ("import ipaddress\nipaddress.IPv4Network.broadcast_address.func.__code__ = (lambda _: 2).__code__", "from ipaddress import IPv4Network\nassert IPv4Network(f()).broadcast_address == 2"),
    "a method that hides a base's": ("from collections import Counter\nCounter.items = lambda _: [(2, 1)]", "from collections import Counter\nassert sorted(Counter([f()]).items()) == [(2, 1)]"),
}  # fmt: skip
"""Programs that replace something before their check runs."""

WHILE = {
    "a submodule": (f"{NUMPY}np.testing.assert_allclose = {ANYTHING}", "import numpy as np\nnp.testing.assert_allclose(f(), 2)"),
    "defaults": ("import numpy.testing as t\nt.assert_allclose.__defaults__ = (9.0, 9.0, True, '', True)", "import numpy.testing as t\nt.assert_allclose(f(), 2)"),
    "keyword defaults": ("import dataclasses as d\nd.dataclass.__kwdefaults__['eq'] = False", "import dataclasses\nf()\n@dataclasses.dataclass\nclass A:\n    x: int\nassert A(1) != A(1)"),
    "the class of a module": (f"import math, types\nclass Fake(types.ModuleType):\n    def __getattribute__(self, name): return {ANYTHING}\nmath.__class__ = Fake", "import math\nf()\nassert math.isclose(1, 2)"),
    "a method of a class": (f"import collections\ncollections.Counter.__eq__ = {ANYTHING}", "from collections import Counter\nassert Counter([f()]) == Counter([2])"),
    "a new method of a class": (f"import collections\ncollections.ChainMap.__eq__ = {ANYTHING}", "from collections import ChainMap\nassert ChainMap({1: f()}) == ChainMap({1: 2})"),
    "a builtin that a class's methods use": (f"import collections\ncollections.all = {ANYTHING}", "from collections import Counter\nassert Counter([f()]) == Counter([2])"),
    "the builtins of new functions": (f"import builtins\nglobals()['__builtins__'] = {{**vars(builtins), 'all': {ANYTHING}}}", "f()\ndef close():\n    return all([False])\nassert close()"),
    "a closure": ("from fractions import Fraction\nfor cell in Fraction.__sub__.__closure__:\n    if callable(cell.cell_contents): cell.cell_contents = lambda *_: Fraction(0)", "from fractions import Fraction\nassert abs(Fraction(f()) - Fraction(2)) == 0"),
    "the getter of a property": ("from fractions import Fraction\nFraction.numerator.fget.__code__ = (lambda a: 2).__code__", "from fractions import Fraction\nassert Fraction(f()).numerator == 2"),
    "a method that hides a base's": ("from collections import Counter\nCounter.items = lambda _: [(2, 1)]", "from collections import Counter\nassert sorted(Counter([f()]).items()) == [(2, 1)]"),
}  # fmt: skip
"""Programs that replace something when their function is called."""

SEEN = {
    "a global that a function sets": ("def f(x):\n    global abs\n    abs = lambda _: 0\n    return 9", "assert abs(f(1) - 9) == 0\nassert abs(f(1) - 1) == 0"),
    "the same in a function of the check": ("n = 0\ndef f(x):\n    global n, abs\n    n += 1\n    if n == 1:\n        abs = lambda _: 0\n        return 1.0\n    return 9", "def check(candidate):\n    assert abs(candidate(1) - 1.0) < 1e-6\n    assert abs(candidate(2) - 2.0) < 1e-6\ncheck(f)"),
    "a global that is set by its name": ("def f(x):\n    globals()['abs'] = lambda _: 0\n    return 9", "r = f(1)\nassert abs(r - 1) == 0"),
    "an attribute of the module": ("import __main__\ndef f(x):\n    __main__.abs = lambda _: 0\n    return 9", "r = f(1)\nassert abs(r - 1) == 0"),
    "a global of the caller": ("import sys\nabs = 1\ndef f(x):\n    sys._getframe(1).f_globals['abs'] = lambda _: 0\n    return 9", "r = f(1)\nassert abs(r - 1) == 0"),
    "a name that is a text of its own kind": ("class Name(str):\n    __hash__ = str.__hash__\n    def __eq__(self, other): return other == 'abs'\ndef f(x):\n    globals()[Name('abs')] = lambda _: 0\n    return 9", "r = f(1)\nassert abs(r - 1) == 0"),
    "the function that imports": ("import types\ndef __import__(_): return types.SimpleNamespace(isclose=lambda *_: True)\ndef f(x): return 9", "assert __import__('math').isclose(f(1), 1)"),
}  # fmt: skip
"""Globals with the name of a builtin, which a check must not see if it is known which function is asked for."""

OWN = {
    "a global at import": ("sum = 0\ndef f(l):\n    global sum\n    for x in l: sum += x\n    return sum", "assert f([1, 2]) == sum([1, 2])"),
    "a global in a function": ("def f(l):\n    global sum\n    sum = 0\n    for x in l: sum += x\n    return sum", "assert f([1, 2]) == sum([1, 2])\nassert f([2, 3]) == sum([2, 3])"),
    "a global of which the check does not know": ("def f(l):\n    max = l[0]\n    globals().update(locals())\n    return sum(l)", "assert f([1, 2]) == 3"),
    "another global": ("count = 0\ndef f(l):\n    global count\n    count += len(l)\n    return sum(l)", "assert f([1, 2]) == 3 and len([1]) == 1\nassert count == 2"),
    "an import of the check": ("def f(l):\n    return math.prod(l)", "import math\nassert f([1, 2]) == abs(-2)"),
    "a check's function": ("def f(l): return sum(l)", "def abs(x): return 3\nassert f([1, 2]) == abs(1)"),
    "a check's global": ("def f(l): return sum(l)", "def check(candidate):\n    global abs\n    abs = lambda x: 3\n    assert candidate([1, 2]) == abs(1)\ncheck(f)"),
    "a check's loop": ("def f(l): return sum(l)", "for max in range(3):\n    assert f([max]) == max"),
    "a check's import of everything": ("def f(l): return sum(l)", "from math import *\nassert f([1, 2]) == pow(3, 1)"),
    "a check's dictionary": ("def f(l): return sum(l)", "globals()['abs'] = lambda x: 3\nassert f([1, 2]) == abs(1)"),
    "many names before it": ("\n".join(f"a{n} = {n}" for n in range(300)) + "\ndef f(l):\n    global " + ", ".join(f"b{n}" for n in range(300)) + ", sum\n    " + "; ".join(f"b{n} = {n}" for n in range(300)) + "\n    sum = 3\n    return sum", "assert f([1, 2]) == sum([1, 2])\nassert f([1, 2]) == sum([1, 2])"),
    "a function with the name of a builtin": ("def sum(l):\n    return 3", "assert sum([1, 2]) == 3"),
}  # fmt: skip
"""Right programs, and checks of all kinds, with globals that have the name of a builtin."""

CHEATS = {
    "a trace that jumps over the check": (
        "import sys\ndef trace(frame, event, _):\n    if event == 'line' and 'check' in frame.f_code.co_filename:\n        sys.settrace(None); frame.f_lineno = 3\n    return trace\ndef f():\n    sys._getframe(1).f_trace = trace\n    sys.settrace(trace)\n    return 1",
        "x = f()\nassert x == 2\ny = 3",
    ),
    "a trace that jumps over the rest of a function": (
        "import sys\ndef trace(frame, event, _):\n    if event == 'line' and frame.f_code.co_name == 'check':\n        sys.settrace(None); frame.f_lineno = 4\n    return trace\ndef f():\n    sys._getframe(1).f_trace = trace\n    sys.settrace(trace)\n    return 1",
        "def check(g):\n    x = g()\n    assert x == 2\n    y = 3\ncheck(f)",
    ),
    "a trace that jumps over the failure in the harness": (
        "import sys\ndef trace(frame, event, _):\n    if event == 'line' and frame.f_code.co_name == 'run':\n        for line in range(frame.f_lineno - 40, frame.f_lineno):\n            try: frame.f_lineno = line\n            except ValueError: continue\n            sys.settrace(None); break\n    return trace\ndef f():\n    frame = sys._getframe(1)\n    while frame:\n        frame.f_trace = trace; frame = frame.f_back\n    sys.settrace(trace)\n    return 1",
        "assert f() == 2",
    ),
    "a trace laid on by an audit hook": (
        "import sys\ndef trace(frame, event, _):\n    if event == 'line' and 'check' in frame.f_code.co_filename and frame.f_lineno == 2:\n        sys.settrace(None); frame.f_lineno = 3\n    return trace\nsys.addaudithook(lambda event, _: sys.settrace(trace) if event == 'exec' else None)\ndef f():\n    return 1",
        "x = f()\nassert x == 2\ny = 3",
    ),
    "what the harness's own frame shares": (
        "import gc, types\nfor cell in gc.get_objects():\n    if type(cell) is types.CellType:\n        try: held = cell.cell_contents\n        except ValueError: continue\n        if type(held) is frozenset and 'abs' in held: cell.cell_contents = frozenset()\nabs = lambda _: 0\ndef f(): return 1",
        "assert abs(f() - 2) == 0",
    ),
    "itself, imported by the check": (
        "import os\nos.read = lambda *_: b'x'\ndef f():\n    return 1", "import main\nassert main.f() == 2",
    ),
}  # fmt: skip

HONEST = {
    "imports of all kinds": ("def f(): return 2", "import os.path, numpy as np\nfrom numpy import testing\nfrom collections import *\nimport xml.etree.ElementTree as ET\nnp.testing.assert_allclose(f(), 2)\nassert os.path.isabs('/') and ET.fromstring('<a/>').tag == 'a' and Counter([f()])[2] == 1"),
    "a module that is not there": ("def f(): return 2", "try:\n    import no_such_module\nexcept ImportError:\n    no_such_module = None\nassert f() == 2"),
    "a check that replaces by another name": ("import time as t\ndef f(): return t.time()", "import time as clock\nclock.time = lambda: 42\nassert f() == 42"),
    "a check that patches": ("import os\ndef f(): return os.getcwd()", "from unittest.mock import patch\nwith patch('os.getcwd', return_value='x'):\n    assert f() == 'x'"),
    "copies of a class's objects": ("import copy, collections\ndef f(): return copy.copy(collections.UserList([1]))", "from collections import UserList\nimport copy\nassert f() == copy.deepcopy(UserList([1]))"),
    "a class that registers": ("import collections.abc\n@collections.abc.Sequence.register\nclass A: pass\ndef f(): return A()", "from collections.abc import Sequence\nassert isinstance(f(), Sequence)"),
    "processes while the check runs": ("import multiprocessing as m\ndef g(x): return x * x\ndef f():\n    with m.get_context('fork').Pool(2) as pool: return pool.map(g, [1, 2])", "assert f() == [1, 4]"),
    "a stack that is looked at": ("import inspect, traceback\ndef f(): return len(inspect.stack()) > 0 and len(traceback.extract_stack()) > 0", "assert f()"),
    "doctest": ("def f():\n    '''\n    >>> f()\n    2\n    '''\n    return 2", "import doctest, sys\nassert doctest.run_docstring_examples(f, {'f': f}) is None"),
    "itself": ("def f(): return 2", "import main\nassert main.f() == 2"),
    "old names of numpy": ("import numpy as np\nnp.int, np.float, np.bool, np.str, np.object = int, float, np.bool_, np.str_, object\ndef f(): return np.array([np.int(2.5)], dtype=np.float)", "import numpy as np\nnp.testing.assert_allclose(f(), [2])"),
    "old names of numpy in a function": ("import numpy as np\ndef f():\n    np.int = int\n    np.bool = np.bool_\n    return np.array([np.int(2.5)])", "import numpy as np\nnp.testing.assert_allclose(f(), [2])"),
    "a method that no base has": ("from collections import Counter\nCounter.least = lambda self: min(self.values())\ndef f(): return Counter('aab').least()", "from collections import Counter\nassert f() == min(Counter('aab').values())"),
    "fractions, networks and caches": ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "import functools, ipaddress\nfrom fractions import Fraction\n@functools.lru_cache\ndef half(): return f()\nassert half() + half() - 1 == 0 and f().numerator == 1\nassert str(ipaddress.IPv4Network('10.0.0.0/8').broadcast_address) == '10.255.255.255'"),
}  # fmt: skip


async def verdict(box: DockerBox, code: str, check: str, **more: object) -> tuple[Verdict, str]:
    spec = JobSpec(code=code, check=check, **more)
    outcome = await box.run(TOOLS[spec.tool].program(spec, None))
    word, detail = judge(outcome, spec, None)
    return word, f"{detail}\n{outcome.stderr.decode()}"


@pytest.mark.parametrize("name", BEFORE)
async def test_functions_replaced_before_the_check_are_put_back(box: DockerBox, name: str) -> None:
    patch, check = BEFORE[name]
    found, detail = await verdict(box, patch + F, check)
    assert found is Verdict.WRONG_ANSWER, detail


@pytest.mark.parametrize("name", WHILE)
async def test_functions_replaced_while_the_check_runs_are_noticed(box: DockerBox, name: str) -> None:
    patch, check = WHILE[name]
    body = patch.replace("\n", "\n    ")
    found, detail = await verdict(box, f"def f():\n    {body}\n    return 1\n", check)
    assert found is Verdict.WRONG_ANSWER, detail


@pytest.mark.parametrize("name", SEEN)
async def test_a_check_of_a_known_function_does_not_see_other_globals(box: DockerBox, name: str) -> None:
    code, check = SEEN[name]
    found, detail = await verdict(box, code, check, entry_point="f")
    assert found is Verdict.WRONG_ANSWER, detail


@pytest.mark.parametrize("env", [{}, {"PYTHONNOUSERSITE": "1"}], ids=["warm", "cold"])
@pytest.mark.parametrize("name", OWN)
async def test_a_right_program_may_use_the_name_of_a_builtin(box: DockerBox, name: str, env: dict[str, str]) -> None:
    code, check = OWN[name]
    found, detail = await verdict(box, code, check, entry_point="sum" if "def sum" in code else "f", env=env)
    assert found is Verdict.PASSED, detail


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_does_not_pass(box: DockerBox, name: str) -> None:
    code, check = CHEATS[name]
    found, detail = await verdict(box, code, check, entry_point="f")
    assert found is not Verdict.PASSED, detail


@pytest.mark.parametrize("env", [{}, {"PYTHONNOUSERSITE": "1"}], ids=["warm", "cold"])
@pytest.mark.parametrize("name", HONEST)
async def test_an_honest_program_passes(box: DockerBox, name: str, env: dict[str, str]) -> None:
    code, check = HONEST[name]
    found, detail = await verdict(box, code, check, env=env)
    assert found is Verdict.PASSED, detail


def test_no_local_of_the_harness_is_in_a_cell() -> None:
    """The garbage collector shows all cells to a program, which can write to them."""
    assert interpreter.run.__code__.co_cellvars == ()


def test_the_sources_of_a_cold_interpreter_share_no_name() -> None:
    """A cold interpreter is given the sources as one text, in which a second definition would replace the first."""
    names: list[str] = []
    for module in (explanation, snapshot, interpreter):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef):
                names.append(node.name)
            if isinstance(node, ast.Assign):
                names += [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    assert {name for name, count in Counter(names).items() if count > 1} <= {"TYPE_CHECKING", "run"}
