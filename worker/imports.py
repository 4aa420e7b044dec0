"""Finds which slow libraries the jobs import, so that sandboxes are kept whose interpreter has imported them already.

The text of a job is read outside the sandbox, in one pass over its first part. Only libraries in a table count: those
take long to import, start no threads, and keep no state that a fork must not share. A sandbox suits a job only if the
job itself imports everything that the sandbox has imported: then the job finds what it would have found without this.
"""

import re
from collections import Counter, deque
from itertools import islice

from evalpool.schemas.job import JobSpec
from evalpool.schemas.settings import Settings

SLOW: dict[str, frozenset[str]] = {
    "bs4": frozenset(),
    "flask": frozenset(),
    "lxml": frozenset(("etree", "html")),
    "matplotlib": frozenset(("pyplot",)),
    "networkx": frozenset(),
    "nltk": frozenset(),
    "numpy": frozenset(),
    "openpyxl": frozenset(),
    "pandas": frozenset(),
    "PIL": frozenset(("Image",)),
    "requests": frozenset(),
    "scipy": frozenset(
        ("fft", "integrate", "interpolate", "linalg", "ndimage", "optimize", "signal", "sparse", "spatial", "special",
         "stats")
    ),
    "seaborn": frozenset(),
    "sklearn": frozenset(
        ("cluster", "datasets", "decomposition", "ensemble", "feature_extraction", "linear_model", "metrics",
         "model_selection", "naive_bayes", "neighbors", "pipeline", "preprocessing", "svm", "tree")
    ),
    "statsmodels": frozenset(("api",)),
    "sympy": frozenset(),
}  # fmt: skip
"""Library → those of its modules that must be imported by name and are slow, too."""
HEAD, MOST = 1 << 18, 200
"""How many characters of a text are read, and how many of its imports."""
RECENT, OFTEN = 256, 2
"""Over how many jobs imports are counted, and how many of them must import the same until a sandbox is kept for it."""
SETS = 4
"""For how many sets of imports sandboxes are kept at a time, in all images together."""
ROOMY_MIB = 256
"""The lowest memory limit of a job for which a library is imported in advance: the agent itself must have room for
it."""
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<modules>[^\n;#]+)|from[ \t]+(?P<package>[\w.]+)[ \t]+import[ \t(]+(?P<names>[^\n;#]*))",
    re.MULTILINE,
)

_MODULE = re.compile(r"[^/]+\.(?:py|pyc|so)|[^/]+/__init__\.[^/]+")
"""The path of a file that is a module, or makes a package of its folder, and comes before those of the image. A folder
without `__init__` comes after them."""


def imported(text: str) -> set[str]:
    """Return the slow modules that a text imports, as far as its lines show."""
    found: set[str] = set()
    if "import" not in text:
        return found
    for match in islice(_IMPORT.finditer(text, 0, HEAD), MOST):
        if (modules := match["modules"]) is not None:
            for each in modules.split(",")[:MOST]:
                _add(found, each.split()[0] if each.strip() else "")
        else:
            names = [each.split()[0] for each in match["names"].split(",")[:MOST] if each.strip()]
            for path in [match["package"], *(f"{match['package']}.{name}" for name in names)]:
                _add(found, path)
    return found


def _add(found: set[str], path: str) -> None:
    """Add the deepest module on a dotted path that is in the table."""
    library, _, rest = path.partition(".")
    if library in SLOW:
        module = rest.partition(".")[0]
        found.add(f"{library}.{module}" if module in SLOW[library] else library)


def wanted(spec: JobSpec, settings: Settings) -> frozenset[str]:
    """Return the slow modules that a job imports, if they may be imported in advance. They may not if the job starts an
    interpreter of its own, has variables that a library may read at its import, brings a module or a package that may
    take the place of one that a library imports, or has little memory."""
    if (
        not settings.warm_imports
        or settings.interpreter != "warm"
        or spec.tool != "python_executor"
        or spec.isolation != "warm"
        or spec.env
        or spec.limits.memory_mib < ROOMY_MIB
        or any(map(_MODULE.fullmatch, spec.files))
    ):
        return frozenset()
    found = imported(spec.code) | imported(spec.check or "")
    return frozenset(found.difference(settings.preload))


class Imports:
    """What the recent jobs of one worker have imported."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, frozenset[str]]] = deque()
        self._counts: Counter[tuple[str, frozenset[str]]] = Counter()
        """Image and modules → how many of the recent jobs imported all of these modules; for whole sets and for single
        modules."""

    def choose(self, image: str, modules: frozenset[str]) -> tuple[str, ...]:
        """Note what a job imports, and return which of it its sandbox should have imported already: the largest of the
        sets that are wanted often, or nothing."""
        self._note(image, modules)
        if not modules:
            return ()
        often = [each for each, count in self._counts.items() if count >= OFTEN]
        # A set that saves two imports is worth twice as many jobs; among equals, the order is always the same.
        often.sort(key=lambda each: (-self._counts[each] * len(each[1]), each[0], sorted(each[1])))
        suited = [kept for place, kept in often[:SETS] if place == image and kept <= modules]
        return tuple(sorted(max(suited, key=lambda kept: len(kept), default=())))

    def _note(self, image: str, modules: frozenset[str]) -> None:
        self._recent.append((image, modules))
        for each in _parts(modules):
            self._counts[image, each] += 1
        if len(self._recent) > RECENT:
            place, old = self._recent.popleft()
            for each in _parts(old):
                self._counts[place, each] -= 1
                if not self._counts[place, each]:
                    del self._counts[place, each]


def _parts(modules: frozenset[str]) -> set[frozenset[str]]:
    return {modules, *(frozenset((module,)) for module in modules)} - {frozenset()}
