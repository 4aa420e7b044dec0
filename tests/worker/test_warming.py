"""Which imports of jobs are found, and for which of them sandboxes are kept."""

from collections.abc import Callable

import pytest

from evalpool.api import submit_batch, submit_job
from evalpool.schemas import JobSpec, Settings
from evalpool.worker.imports import HEAD, MOST, OFTEN, RECENT, ROOMY_MIB, SETS, Imports, imported, wanted
from tests.conftest import PATIENCE, WorkerProcess, eventually


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import numpy", {"numpy"}),
        ("import numpy as np, pandas", {"numpy", "pandas"}),
        ("import os, sys; import numpy\nimport json  # import pandas", set()),
        ("def f():\n    from pandas import (\n        DataFrame,\n    )\n", {"pandas"}),
        ("try:\n\timport sympy\nexcept ImportError: pass", {"sympy"}),
        ("import matplotlib.pyplot as plt", {"matplotlib.pyplot"}),
        ("from matplotlib import pyplot as plt, cm", {"matplotlib.pyplot", "matplotlib"}),
        ("from sklearn.linear_model._base import LinearModel", {"sklearn.linear_model"}),
        ("from scipy.stats import norm", {"scipy.stats"}),
        ("import numpyish, xnumpy\nfrom .numpy import x\nfrom numpy_ import x\nimportnumpy", set()),
        ("numpy = 1\n# import numpy\nprint('import numpy')", set()),
        ("import ,, numpy,\nfrom pandas import", {"numpy"}),
        ("import \nimport\n from  import x\nimport a.b.c", set()),
    ],
)
def test_imports_are_found_in_the_text_of_a_job(text: str, modules: set[str]) -> None:
    assert imported(text) == modules


def test_only_a_bounded_part_of_a_text_is_read() -> None:
    assert imported("#" * (HEAD - 5) + "\nimport numpy") == set()
    assert imported("import json\n" * MOST + "import numpy") == set()
    assert imported("import " + "a," * MOST + "numpy") == set()


@pytest.mark.parametrize(
    "more",
    [
        {"tool": "shell_executor"},
        {"isolation": "fresh"},
        {"env": {"MPLBACKEND": "svg"}},
        {"limits": {"memory_mib": ROOMY_MIB - 1}},
        {"files": {"numpy.py": "x = 1"}},
        {"files": {"numpy/__init__.py": ""}},
        {"files": {"random.py": "x = 1"}},
        {"files": {"six.cpython-311-x86_64-linux-gnu.so": "x"}},
        {"files": {"dateutil/__init__.py": "", "dateutil/parser.py": ""}},
    ],
)
def test_some_jobs_get_nothing_that_is_imported_in_advance(more: dict[str, object]) -> None:
    spec = JobSpec.model_validate({"code": "import numpy", **more})
    assert wanted(spec, Settings()) == frozenset()


def test_the_imports_of_program_and_check_count_unless_a_setting_says_otherwise() -> None:
    spec = JobSpec(
        code="import numpy", check="import pandas", files={"data/numpy.csv": "1", "data/random.py": "", "six": ""}
    )
    assert wanted(spec, Settings()) == {"numpy", "pandas"}
    assert wanted(spec, Settings(preload=("pandas",))) == {"numpy"}
    assert wanted(spec, Settings(interpreter="cold")) == frozenset()
    assert wanted(spec, Settings(warm_imports=False)) == frozenset()


def choose(imports: Imports, *modules: str, image: str = "a") -> tuple[str, ...]:
    return imports.choose(image, frozenset(modules))


def test_a_set_is_chosen_as_soon_as_several_jobs_import_it() -> None:
    imports = Imports()
    assert [choose(imports, "numpy", "pandas") for _ in range(OFTEN)] == [()] * (OFTEN - 1) + [("numpy", "pandas")]
    assert choose(imports, "numpy", "pandas", image="b") == ()
    assert choose(imports, "sympy") == ()
    assert choose(imports) == ()


def test_a_job_never_gets_a_module_that_it_does_not_import() -> None:
    imports = Imports()
    for _ in range(20):
        choose(imports, "numpy", "pandas")
    assert choose(imports, "numpy") == ("numpy",)
    assert choose(imports, "numpy", "sympy") == ("numpy",)
    assert choose(imports, "seaborn") == ()


def test_the_number_of_sets_is_bounded_and_the_most_wanted_ones_win() -> None:
    imports = Imports()
    names = [f"module{n}" for n in range(SETS + 3)]
    for n, name in enumerate(names):
        for _ in range(3 * n + OFTEN):
            choose(imports, name)
    chosen = [name for name in names if choose(imports, name)]
    assert chosen == names[-SETS:]


def test_imports_of_long_ago_are_forgotten() -> None:
    imports = Imports()
    for _ in range(9):
        choose(imports, "numpy")
    for _ in range(RECENT):
        choose(imports)
    assert choose(imports, "numpy") == ()
    assert len(imports._counts) == 1


@pytest.mark.docker
@pytest.mark.redis
def test_a_worker_keeps_sandboxes_that_have_imported_what_its_jobs_import(
    start_worker: Callable[..., WorkerProcess],
) -> None:
    start_worker(EVALPOOL_SLOTS="1")
    code = (
        "import sys; before = 'numpy' in sys.modules\nimport numpy\n"
        "numpy.sum = None; print(before, float(numpy.random.rand()), callable(numpy.mean)); numpy.mean = None"
    )
    seen: list[list[str]] = []

    def warm() -> bool:
        result = submit_job(code=code, check="assert numpy.arange(3).max() == 2").result(PATIENCE)
        assert result.passed, result
        seen.append(result.stdout.split())
        return [each[0] for each in seen[-3:]] == ["True"] * 3

    eventually(warm)
    assert seen[0][0] == "False"  # the first job does not wait
    assert len({number for _, number, _ in seen}) == len(seen)
    assert {whole for *_, whole in seen} == {"True"}  # nothing is left of what the job before has replaced
    others = submit_batch([JobSpec(code="import sys; print('numpy' in sys.modules)")] * 3)
    others.wait(PATIENCE)
    assert [result.stdout for result in others.results()] == ["False\n"] * 3
