import pytest

from schemas import Case, InvalidJob, JobSpec, Limits, Priority


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "code: Field required"),
        ({"cod": "x"}, "cod: unknown field"),
        ({"code": "x", "files": {"a/": ""}}, "'a/' must be a relative path of a file"),
        ({"code": "x", "files": {"a": "", "a/b": ""}}, "files: 'a' cannot be a file and a folder"),
        ({"code": "x", "language": "cobol"}, "language: 'cobol' is not one of python"),
        ({"code": "x", "language": "c", "tool": "python_executor"}, "language: python_executor does not run c"),
        ({"code": 7}, "code"),
        ({"code": "x", "timeout": 3}, "timeout: unknown field"),
        ({"code": "x", "tool": "perl_executor"}, "tool: unknown tool 'perl_executor'"),
        ({"code": "x", "limits": {"cpu_seconds": -1}}, "limits.cpu_seconds"),
        ({"code": "x", "limits": {"cpus": 1}}, "limits.cpus: unknown field"),
        ({"code": "x", "files": {"/etc/passwd": ""}}, "files./etc/passwd"),
        ({"code": "x", "files": {"a/../../b": ""}}, "files.a/../../b"),
        ({"code": "x", "files": {"a": "base64:###"}}, "files.a: not valid base64"),
        ({"code": "x" * (11 << 20)}, "code: 11,534,336 bytes; at most 10,485,760"),
        ({"code": "é" * (6 << 20)}, "code: 12,582,912 bytes"),
        ({"code": "\ud800"}, "code"),
        ({"code": "x", "args": ["a\0b"]}, "args.0: contains a NUL"),
        ({"code": "x", "env": {"A=B": "c"}}, "env.A=B"),
        ({"code": "x", "priority": "urgent"}, "priority"),
        ({"code": "x", "isolation": "none"}, "isolation"),
        ({"code": "x", "image": "-v/:/host"}, "image"),
        ({"code": "x", "cases": [{"stdin": "1"}]}, "cases.0.expected: Field required"),
        ({"code": "x", "cases": [{"stdin": "", "expected": "", "comparator": "fuzzy"}]}, "unknown comparator 'fuzzy'"),
        ({"code": "x", "check": "assert 1", "cases": [Case("", "")]}, "cases: a job has a check or cases"),
        ({"code": "x", "tool": "bash", "check": "assert 1"}, "check: an assert-style check needs a Python program"),
        ({"code": "x", "tool": "multi_code_executor", "language": "ada"}, "language: 'ada'"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], place: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        JobSpec(**fields)
    assert place in str(raised.value)
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


def test_bash_is_another_name_of_the_shell_executor() -> None:
    assert JobSpec(code="ls", tool="bash").tool == "shell_executor"


def test_a_case_takes_its_input_and_output_by_position() -> None:
    case = Case("1\n", "2\n")
    assert (case.stdin, case.expected, case.args, case.comparator) == ("1\n", "2\n", (), "rstrip")


def test_a_spec_survives_its_way_through_json() -> None:
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
