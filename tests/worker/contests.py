"""Contest problems of our own, with inputs of up to a megabyte, and right, wrong and slow solutions."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from evalpool.schemas import Case

# ruff: noqa: E501 - programs are data

LARGEST = 200_000


@dataclass(frozen=True)
class Problem:
    """A problem with its solutions, by language and verdict."""

    case: Callable[[random.Random, int], Case]
    """Makes a case of about this many numbers."""
    cases: int
    solutions: dict[tuple[str, str], str]

    def made(self, seed: int = 7, largest: int = LARGEST) -> list[Case]:
        """Return the cases, small ones first, as in contests. The last has the largest size that is allowed."""
        rng = random.Random(seed)
        sizes = (int(largest * ((n + 1) / self.cases) ** 4) for n in range(self.cases))
        return [self.case(rng, max(2, size)) for size in sizes]


def _lines(*lines: object) -> str:
    return "\n".join(map(str, lines)) + "\n"


def _sorting(rng: random.Random, size: int) -> Case:
    numbers = [rng.randrange(1000) for _ in range(size)]
    return Case(_lines(size, " ".join(map(str, numbers))), _lines(*sorted(numbers)))


def _sums(rng: random.Random, size: int) -> Case:
    """Return a case with sums of long ranges, which are too large for 32 bits if there are many numbers."""
    size = size * 3 // 10 + 1
    numbers = [rng.randrange(10**6) for _ in range(size)]
    before = [0]
    for number in numbers:
        before.append(before[-1] + number)
    asked = [(rng.randint(1, size // 10 + 1), rng.randint(size - size // 10, size)) for _ in range(size)]
    return Case(
        _lines(f"{size} {size}", " ".join(map(str, numbers)), *(f"{a} {b}" for a, b in asked)),
        _lines(*(before[b] - before[a - 1] for a, b in asked)),
    )


def _depths(rng: random.Random, size: int) -> Case:
    """Return a case with a tree that is almost a path: its depth is nine tenths of its size."""
    parents = [node - 1 - (node > 1 and rng.random() < 0.1) for node in range(1, size)]
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return Case(_lines(size, " ".join(map(str, parents))), _lines(sum(depths)))


_CPP = "#include <bits/stdc++.h>\nusing namespace std;\n"
_JAVA = """import java.io.*;
import java.util.*;
public class Main {
  static StreamTokenizer in = new StreamTokenizer(new BufferedInputStream(System.in));
  static int next() throws IOException { in.nextToken(); return (int) in.nval; }
  %s
  public static void main(String[] args) throws IOException {
    %s
  }
}
"""
_READ_ARRAY = "int n; cin >> n; vector<int> a(n); for (auto &x : a) cin >> x;"
_JAVA_ARRAY = "int n = next(); int[] a = new int[n]; for (int i = 0; i < n; i++) a[i] = next();"
_JAVA_SAY = (
    "StringBuilder out = new StringBuilder(); for (int x : a) out.append(x).append('\\n'); System.out.print(out);"
)
_CPP_SUMS = "long long n, q; cin >> n >> q; vector<long long> a(n); for (auto &x : a) cin >> x;"
_JAVA_SUMS = "int n = next(), q = next(); long[] a = new long[n + 1]; for (int i = 1; i <= n; i++) a[i] = next();"
_TREE = "int n; vector<int> p; vector<vector<int>> kids;\n"
_TREE_READ = (
    "cin >> n; p.assign(n, -1); kids.resize(n); for (int i = 1; i < n; i++) { cin >> p[i]; kids[p[i]].push_back(i); }"
)
_JAVA_TREE = "static int[] p, first, next;"
_JAVA_TREE_READ = "int n = next(); p = new int[n]; first = new int[n]; next = new int[n]; Arrays.fill(first, -1); for (int i = 1; i < n; i++) { p[i] = next(); next[i] = first[p[i]]; first[p[i]] = i; }"
_PYTHON_TREE = "import sys\ndata = sys.stdin.read().split()\nn = int(data[0])\np = [-1] + list(map(int, data[1:]))\nkids = [[] for _ in range(n)]\nfor i in range(1, n): kids[p[i]].append(i)\n"

PROBLEMS = {
    "sorting": Problem(
        _sorting,
        40,
        {
            # every line is flushed, as in most contestants' programs
            ("cpp", "passed"): _CPP
            + f"int main() {{ {_READ_ARRAY} sort(a.begin(), a.end()); for (int x : a) cout << x << endl; }}",
            ("cpp", "wrong_answer"): _CPP
            + f"int main() {{ {_READ_ARRAY} sort(a.begin(), a.end()); a.erase(unique(a.begin(), a.end()), a.end()); for (int x : a) cout << x << '\\n'; }}",
            ("cpp", "time_limit"): _CPP
            + f"int main() {{ {_READ_ARRAY} for (int i = 0; i < n; i++) for (int j = 0; j + 1 < n - i; j++) if (a[j] > a[j + 1]) swap(a[j], a[j + 1]); for (int x : a) cout << x << '\\n'; }}",
            ("java", "passed"): _JAVA % ("", f"{_JAVA_ARRAY} Arrays.sort(a); {_JAVA_SAY}"),
            ("java", "wrong_answer"): _JAVA % ("", f"{_JAVA_ARRAY} Arrays.sort(a, 0, Math.min(n, 99999)); {_JAVA_SAY}"),
            ("java", "time_limit"): _JAVA
            % (
                "",
                f"{_JAVA_ARRAY} for (int i = 0; i < n; i++) for (int j = 0; j + 1 < n - i; j++) if (a[j] > a[j + 1]) {{ int t = a[j]; a[j] = a[j + 1]; a[j + 1] = t; }} {_JAVA_SAY}",
            ),
            ("python", "passed"): "input()\nfor x in sorted(map(int, input().split())): print(x)",
            ("python", "wrong_answer"): "input()\nfor x in sorted(input().split()): print(x)",
            (
                "python",
                "time_limit",
            ): "n = int(input())\na = list(map(int, input().split()))\nwhile a:\n    x = min(a)\n    print(x)\n    a.remove(x)",
        },
    ),
    "sums": Problem(
        _sums,
        60,
        {
            ("cpp", "passed"): _CPP
            + f"int main() {{ {_CPP_SUMS} vector<long long> s(n + 1); partial_sum(a.begin(), a.end(), s.begin() + 1); while (q--) {{ int l, r; cin >> l >> r; cout << s[r] - s[l - 1] << endl; }} }}",
            ("cpp", "wrong_answer"): _CPP
            + f"int main() {{ {_CPP_SUMS} vector<int> s(n + 1); partial_sum(a.begin(), a.end(), s.begin() + 1, [](long long x, long long y) {{ return unsigned(x + y); }}); while (q--) {{ int l, r; cin >> l >> r; cout << s[r] - s[l - 1] << '\\n'; }} }}",
            ("cpp", "time_limit"): _CPP
            + f"int main() {{ {_CPP_SUMS} while (q--) {{ int l, r; cin >> l >> r; volatile long long s; for (int again = 0; again < 20; again++) {{ s = 0; for (int i = l - 1; i < r; i++) s = s + a[i]; }} cout << s << '\\n'; }} }}",
            ("java", "passed"): _JAVA
            % (
                "",
                f"{_JAVA_SUMS} for (int i = 1; i <= n; i++) a[i] += a[i - 1]; PrintWriter out = new PrintWriter(System.out); while (q-- > 0) {{ int l = next(), r = next(); out.println(a[r] - a[l - 1]); }} out.flush();",
            ),
            ("java", "wrong_answer"): _JAVA
            % (
                "",
                f"{_JAVA_SUMS} int[] s = new int[n + 1]; for (int i = 1; i <= n; i++) s[i] = s[i - 1] + (int) a[i]; PrintWriter out = new PrintWriter(System.out); while (q-- > 0) {{ int l = next(), r = next(); out.println(s[r] - s[l - 1]); }} out.flush();",
            ),
            ("java", "time_limit"): _JAVA
            % (
                "static volatile long s;",
                f"{_JAVA_SUMS} while (q-- > 0) {{ int l = next(), r = next(); for (int again = 0; again < 20; again++) {{ s = 0; for (int i = l; i <= r; i++) s += a[i]; }} System.out.println(s); }}",
            ),
            (
                "python",
                "passed",
            ): "import sys\nn, q = map(int, input().split())\ns = [0]\nfor x in map(int, input().split()): s.append(s[-1] + x)\nfor line in sys.stdin:\n    l, r = map(int, line.split())\n    print(s[r] - s[l - 1])",
            (
                "python",
                "wrong_answer",
            ): "import sys\nn, q = map(int, input().split())\na = list(map(int, input().split()))\ns = [0.0]\nfor x in a: s.append(s[-1] + x / 3)\nfor line in sys.stdin:\n    l, r = map(int, line.split())\n    print(int((s[r] - s[l - 1]) * 3))",
            (
                "python",
                "time_limit",
            ): "import sys\nn, q = map(int, input().split())\na = list(map(int, input().split()))\nfor line in sys.stdin:\n    l, r = map(int, line.split())\n    print(max(sum(a[l - 1:r]) for _ in range(20)))",
        },
    ),
    "depths": Problem(
        _depths,
        20,
        {
            ("cpp", "passed"): _CPP
            + _TREE
            + f"long long below(int v, int d) {{ long long s = d; for (int k : kids[v]) s += below(k, d + 1); return s; }}\nint main() {{ {_TREE_READ} cout << below(0, 0) << endl; }}",
            ("cpp", "wrong_answer"): _CPP
            + _TREE
            + f"int below(int v, int d) {{ int s = d; for (int k : kids[v]) s += below(k, d + 1); return s; }}\nint main() {{ {_TREE_READ} cout << below(0, 0) << endl; }}",
            ("cpp", "time_limit"): _CPP
            + _TREE
            + f"int main() {{ {_TREE_READ} volatile long long s = 0; for (int i = 0; i < n; i++) for (int v = i; p[v] >= 0; v = p[v]) s = s + 1; cout << s << endl; }}",
            ("java", "passed"): _JAVA
            % (
                _JAVA_TREE
                + " static long below(int v, int d) { long s = d; for (int k = first[v]; k >= 0; k = next[k]) s += below(k, d + 1); return s; }",
                _JAVA_TREE_READ.replace("Arrays.fill(first, -1)", "Arrays.fill(first, -1); Arrays.fill(next, -1)")
                + " System.out.println(below(0, 0));",
            ),
            ("java", "wrong_answer"): _JAVA
            % (
                _JAVA_TREE
                + " static int below(int v, int d) { int s = d; for (int k = first[v]; k >= 0; k = next[k]) s += below(k, d + 1); return s; }",
                _JAVA_TREE_READ.replace("Arrays.fill(first, -1)", "Arrays.fill(first, -1); Arrays.fill(next, -1)")
                + " System.out.println(below(0, 0));",
            ),
            ("java", "time_limit"): _JAVA
            % (
                _JAVA_TREE + " static volatile long s;",
                _JAVA_TREE_READ
                + " for (int i = 1; i < n; i++) for (int v = i; v > 0; v = p[v]) s++; System.out.println(s);",
            ),
            ("python", "passed"): _PYTHON_TREE
            + "sys.setrecursionlimit(10**6)\ndef below(v, d):\n    s = d\n    for k in kids[v]: s += below(k, d + 1)\n    return s\nprint(below(0, 0))",
            ("python", "wrong_answer"): _PYTHON_TREE
            + "d = [0] * n\nfor i in range(1, n): d[i] = d[i - 1] + 1\nprint(sum(d))",
            ("python", "time_limit"): _PYTHON_TREE
            + "s = 0\nfor v in range(n):\n    while p[v] >= 0:\n        v = p[v]\n        s += 1\nprint(s)",
        },
    ),
}
