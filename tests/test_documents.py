"""The documents say what the code does, and the compose file keeps its promises."""

import ast
import re
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from evalpool.schemas import Settings, Verdict
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PUBLIC = ("evalpool", "evalpool.schemas", "evalpool.api", "evalpool.sandbox")
"""Modules whose names are for users."""
PACKAGES = ("schemas", "worker", "api")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
SOCKET = "/var/run/docker.sock"


def table(text: str) -> dict[str, list[str]]:
    """The rows of the table in a text: the name in the first cell → the other cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    assert len({row[0] for row in rows}) == len(rows), "a row is there twice"
    return {row[0].strip("`"): row[1:] for row in rows}


def code(language: str, text: str = README) -> list[str]:
    """The text of each fenced block in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# -- the README --------------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_has_a_command_and_a_result_on_its_first_screen() -> None:
    lines = README.splitlines()
    assert 100 <= len(lines) <= 150
    assert "make demo" in lines[:20]
    assert "{1: 0.33333333333333337, 3: 1.0}" in lines[:40]


def test_the_configuration_table_lists_every_setting_with_its_default() -> None:
    shown = table((ROOT / "docs" / "configuration.md").read_text())
    assert list(shown) == [f"EVALPOOL_{name.upper()}" for name in Settings.model_fields]
    for name, field in Settings.model_fields.items():
        default, meaning = shown[f"EVALPOOL_{name.upper()}"]
        assert meaning, name
        if field.default_factory is not None:
            assert re.fullmatch(r"\*.+\*", default), f"{name}: a default that depends on the machine is in italics"
        else:
            assert default == as_shown(field.default), name


def as_shown(default: object) -> str:
    """A default as the table writes it: as one would set it."""
    if default is None:
        return "unset"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def test_the_verdict_table_lists_every_verdict_and_whether_it_is_scored() -> None:
    shown = table((ROOT / "docs" / "reference" / "verdicts.md").read_text())
    assert {name: cells[-1] for name, cells in shown.items()} == {
        verdict.value: "yes" if verdict.scored else "no" for verdict in Verdict
    }
    assert all(f"`{verdict.value}`" in README for verdict in Verdict)


def test_the_python_in_the_documents_imports_what_there_is() -> None:
    blocks = [block for document in DOCUMENTS for block in code("python", document.read_text())]
    assert len(blocks) > 2
    for node in (node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)):
        for name in node.names:
            assert hasattr(import_module(str(node.module)), name.name)


def test_a_tool_fits_in_fifteen_lines_of_the_readme() -> None:
    (block,) = [block for block in code("python") if "register_tool" in block]
    tool = block[block.index("@register_tool") : block.index("async def main")]
    assert len(tool.strip().splitlines()) <= 15


def test_the_documents_import_by_the_name_of_the_package() -> None:
    for document in DOCUMENTS:
        for block in code("python", document.read_text()):
            assert not re.search(r"^(from|import) (api|worker|schemas)\b", block, re.MULTILINE), document.name


# -- commands, files, links --------------------------------------------------------------------------------------------


def test_the_compose_file_and_the_image_name_commands_that_exist() -> None:
    from evalpool.api.cli import app

    commands = {command.name or str(getattr(command.callback, "__name__", "")) for command in app.registered_commands}
    commands |= {str(group.name) for group in app.registered_groups}
    for file in (ROOT / "docker-compose.yml", ROOT / "deploy" / "Dockerfile"):
        named = set(re.findall(r"(?:[`/\"]|worker |exec )evalpool\s([a-z]+)\b", file.read_text(), re.MULTILINE))
        assert named <= commands, file.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        goal = (document.parent / path).resolve() if path else document
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


def anchors(document: Path) -> set[str]:
    """The headings of a document as links name them, with those that `make docs` makes from docstrings."""
    text = document.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE) + re.findall(r"^::: \S*?(\w+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_reading_order_has_every_module() -> None:
    shown = set(re.findall(r"\(\.\./([^)#]+)\)", (ROOT / "docs" / "architecture.md").read_text()))
    modules = {str(path.relative_to(ROOT)) for path in MODULES if path.name != "__init__.py"}
    missing = {module for module in modules if "/migrations/" not in module} - shown
    assert not missing, "docs/architecture.md: the map lacks these"


def test_a_job_is_followed_through_five_stops_and_eight_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    story = text.partition("\n## One job in five stops\n")[2].partition("\n```")[0]
    assert re.findall(r"^(\d)\. ", story, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert len(re.findall(r"\(\.\./[^)]+\.py\)", story)) == 8


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    words = re.findall(r"^\*\*(.+?)\*\*(?: \([^)]+\))?: ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 30
    assert words == sorted(set(words), key=str.lower)


# -- the code's own promises -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_the_sorted_public_names(package: str) -> None:
    module = import_module(package)
    names: list[str] = getattr(module, "__all__", [])
    assert names == sorted(set(names))
    assert all(getattr(module, name) is not None for name in names)
    public = {name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public - {"TYPE_CHECKING"} <= set(names)


@pytest.mark.parametrize("name", ["job", "limits", "result", "batch", "report", "verdict"])
def test_every_field_that_users_see_is_explained(name: str) -> None:
    tree = ast.parse((ROOT / "schemas" / f"{name}.py").read_text())
    for model in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        for field, following in zip(model.body, [*model.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign | ast.Assign) and "model_config" not in ast.unparse(field):
                explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert explained, f"{model.name}: {ast.unparse(field)}"


@pytest.mark.parametrize("package", PUBLIC)
def test_everything_public_has_a_docstring(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type) or callable(value):
            assert value.__doc__, name
            methods = [getattr(value, key) for key in vars(value) if key[0] != "_"] if isinstance(value, type) else []
            assert not [each for each in methods if callable(each) and not getdoc(each)], name


def test_queries_are_only_in_schemas() -> None:
    query = {"delete", "func", "insert", "select", "text", "update", "Session"}
    for path in MODULES:
        if path.is_relative_to(ROOT / "schemas"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("sqlalchemy", "sqlmodel"):
                assert not query & {name.name for name in node.names}, path


def test_the_name_of_a_test_is_a_sentence() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert node.name.count("_") >= 3, f"{path.name}: {node.name}"


def test_no_module_is_longer_than_a_few_screens() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert not {path: length for path, length in lengths.items() if length > 480}


# -- docker-compose.yml ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_every_service_is_watched_and_comes_back(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"redis", "postgres", "worker", "flower"}
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name
        for condition in service.get("depends_on", {}).values():
            assert condition == {"condition": "service_healthy"}, name


def test_the_worker_alone_has_the_docker_socket_and_nobody_is_privileged(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert [name for name, service in services.items() if SOCKET in str(service)] == ["worker"]
    assert not any("privileged" in service for service in services.values())
    assert {name: service["cap_add"] for name, service in services.items() if "cap_add" in service} == {
        "worker": ["SYS_NICE"]
    }
    assert services["worker"]["pid"] == "host"  # see worker/sandbox/engine.py: an owner is a process of the host
    assert services["worker"]["stop_grace_period"] == "2m"


def test_redis_keeps_a_log_and_evicts_nothing(compose: dict[str, Any]) -> None:
    command = compose["services"]["redis"]["command"]
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction"):
        assert option in command


def test_images_are_pinned_to_a_major_version(compose: dict[str, Any]) -> None:
    base = re.findall(r"^FROM (\S+)", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    for image in [*base, *(service["image"] for service in compose["services"].values())]:
        assert re.fullmatch(r"[a-z0-9/]+:\d[\w.-]*", image), image


def test_only_the_loopback_interface_is_published_and_the_queue_leads_nowhere(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
    for name in (*compose["services"]["redis"]["networks"], *compose["services"]["postgres"]["networks"]):
        assert compose["networks"][name] == {"internal": True}


def test_no_password_is_written_down_and_a_missing_one_is_refused(compose: dict[str, Any]) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    uses = re.findall(r"\$\{(\w*PASSWORD)(\S*)", text)
    assert {name for name, _ in uses} == {"POSTGRES_PASSWORD", "FLOWER_PASSWORD"}
    assert all(rest.startswith(":?") for _, rest in uses)
    example = (ROOT / "deploy" / "compose.env.example").read_text()
    assert all(f"\n{name}=\n" in example for name, _ in uses)
    # not on the command line, where every process list shows it
    assert "FLOWER_BASIC_AUTH" in compose["services"]["flower"]["environment"]


def test_what_the_image_copies_is_not_ignored() -> None:
    copied = re.findall(r"^COPY (.+) /src", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    names = {name for line in copied for name in line.split()}
    assert "*" in ignored
    assert names == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)
