import pytest

from evalpool.schemas import Case, InvalidJob, JobSpec, Limits, Priority


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "code: Field required"),
        ({"cod": "x"}, "cod: unknown field"),
        ({"code": "x", "files": {"a/": ""}}, "'a/' must be a relative path of a file"),
        ({"code": "x", "files": {"a": "", "a/b": ""}}, "files: 'a' cannot be both a file and a folder"),
        ({"code": "x", "language": "cobol"}, "language: 'cobol' is not one of python"),
        ({"code": "x", "language": "c", "tool": "python_executor"}, "language: python_executor does not run c"),
        ({"code": 7}, "code"),
        ({"code": "x", "timeout": 3}, "timeout: unknown field"),
        ({"code": "x", "tool": "perl_executor"}, "tool: unknown tool 'perl_executor'"),
        ({"code": "x", "limits": {"cpu_seconds": -1}}, "limits.cpu_seconds"),
        ({"code": "x", "limits": {"cpus": 1}}, "limits.cpus: unknown field"),
        ({"code": "x", "files": {"/etc/passwd": ""}}, "files./etc/passwd"),
        ({"code": "x", "files": {"a/../../b": ""}}, "files.a/../../b"),
        ({"code": "x", "files": {"a": "base64:###"}}, "files.a: it is not valid base64"),
        ({"code": "x" * (11 << 20)}, "code: it has 11,534,336 bytes; at most 10,485,760"),
        ({"code": "é" * (6 << 20)}, "code: it has 12,582,912 bytes"),
        ({"code": "\ud800"}, "code: it contains an unpaired surrogate"),
        ({"code": "x", "args": ["a\0b"]}, "args.0: it contains a NUL"),
        ({"code": "x", "env": {"A=B": "c"}}, "env.A=B"),
        ({"code": "x", "priority": "urgent"}, "priority: it must be 'high', 'normal' or 'low'"),
        ({"code": "x", "lables": {}}, "lables: unknown field (did you mean labels?); JobSpec has code"),
        ({"code": "x", "limits": {"memory_mb": 1}}, "limits.memory_mb: unknown field (did you mean memory_mib?)"),
        ({"code": "x", "labels": {"a": [1]}}, "labels.a: it must be text, a number, true, false or null, not list"),
        ({"code": "x", "labels": {"a": "x" * (11 << 20)}}, "labels.a: it has 11,534,336 bytes; at most"),
        ({"code": "x", "labels": {"a": "\ud800"}}, "labels.a: it contains an unpaired surrogate"),
        ({"code": "x", "task_id": 1.5}, "task_id: it must be text or a whole number, not float"),
        ({"code": "x", "entry_point": "a b"}, "entry_point: 'a b' is not a valid function name"),
        ({"code": "x", "image": ""}, "image: '' is not a valid image name"),
        ({"code": "x", "cases": 5}, "cases: it must be a list"),
        ({"code": "x", "limits": {"cpu_seconds": "a"}}, "limits.cpu_seconds: it must be a number"),
        ({"code": "x", "isolation": "none"}, "isolation"),
        ({"code": "x", "image": "-v/:/host"}, "image: '-v/:/host' is not a valid image name"),
        ({"code": "x", "cases": [{"stdin": "1"}]}, "cases.0.expected: Field required"),
        ({"code": "x", "cases": [{"stdin": "", "expected": "", "comparator": "fuzzy"}]}, "unknown comparator 'fuzzy'"),
        (
            {"code": "x", "check": "assert 1", "cases": [Case("", "")]},
            "cases: a job can have a check or cases, but not both",
        ),
        ({"code": "x", "tool": "bash", "check": "assert 1"}, "check: an assert-style check needs a Python program"),
        (
            {"code": "x", "tool": "notebook_executor", "check": "assert 1"},
            "check: an assert-style check needs a Python",
        ),
        ({"code": "x", "entry_point": "f"}, "entry_point: an entry point needs a Python program with cases or a check"),
        ({"code": "x", "checker": "exit(0)"}, "checker: a checker needs cases with the comparator 'checker'"),
        ({"code": "x", "cases": [Case("", "", comparator="checker")]}, "such cases need a checker"),
        ({"code": "x", "files": dict.fromkeys("abcd", "x" * (9 << 20))}, "code: the job with its files and cases is"),
        ({"code": "x", "tool": "multi_code_executor", "language": "ada"}, "language: 'ada'"),
    ],
)
def test_the_error_names_the_wrong_field(fields: dict[str, object], place: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        JobSpec(**fields)
    assert place in str(raised.value)
    assert not any(word in str(raised.value) for word in ("function-", "pattern", "Input should", "codec"))
    assert isinstance(raised.value, ValueError)


def test_the_defaults_are_those_of_the_contract() -> None:
    spec = JobSpec(code="print(1)")
    assert (spec.tool, spec.language, spec.stdin, spec.args, spec.env, spec.files) == (
        "python_executor",
        "python",
        "",
        (),
        {},
        {},
    )
    assert (spec.check, spec.cases, spec.stop_early, spec.isolation, spec.priority) == (
        None,
        (),
        True,
        "warm",
        Priority.NORMAL,
    )
    limits = spec.limits
    assert (limits.cpu_seconds, limits.wall_seconds, limits.wall, limits.memory_mib) == (5, None, 22, 512)
    assert (limits.processes, limits.output_bytes, limits.file_mib, limits.disk_mib) == (64, 1_048_576, 64, 64)


def test_bash_is_an_alias_of_shell_executor() -> None:
    assert JobSpec(code="ls", tool="bash").tool == "shell_executor"


def test_a_case_takes_its_fields_by_position() -> None:
    assert Case("1 2", "3") == Case(stdin="1 2", expected="3")
    assert Case("1", "2", ("x",), "exact") == Case(stdin="1", expected="2", args=("x",), comparator="exact")


def test_a_spec_is_the_same_after_a_round_trip_through_json() -> None:
    spec = JobSpec(
        code="print('ü')",
        cases=[Case("1", "2")],
        limits=Limits(cpu_seconds=1.5),
        labels={"model": "m", "t": 0.2},
        task_id=7,
    )
    assert JobSpec.model_validate_json(spec.model_dump_json(exclude_defaults=True)) == spec


def test_a_spec_is_frozen() -> None:
    spec = JobSpec(code="x")
    with pytest.raises(ValueError, match="frozen"):
        spec.code = "y"  # type: ignore[misc]


def test_a_job_given_by_position_is_refused_with_the_name_of_its_field() -> None:
    with pytest.raises(TypeError, match=r"JobSpec takes its fields by name: write JobSpec\(code=…\)"):
        JobSpec("print(1)")  # type: ignore[call-arg,misc]
