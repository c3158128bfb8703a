"""What is installed, what it costs to import, and which way the imports point."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from advisor import registry, testing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
MOUNTS = {"advisor.rules": "rules", "advisor.reports": "reports"}

# Modules that run inside the user's process; they alone import torch.
TORCH_IN_CHILD = {
    "advisor.clock",
    "advisor.capture.annotate",
    "advisor.capture.builds",
    "advisor.capture.calibrate",
    "advisor.capture.child",
    "advisor.capture.compiled",
    "advisor.capture.counted",
    "advisor.capture.eager",
    "advisor.capture.fetches",
    "advisor.capture.hooks",
    "advisor.capture.loaderstate",
    "advisor.capture.loopcalls",
    "advisor.capture.probe",
    "advisor.capture.replay",
    "advisor.verify.arm",
    "advisor.verify.arms",
    "advisor.verify.closeness",
    "advisor.verify.draws",
    "advisor.verify.interventions",
    "advisor.verify.proving",
    "advisor.verify.recompute",
    "advisor.verify.recording",
    "advisor.verify.regiondraws",
    "advisor.verify.resident",
    "advisor.verify.rounding",
}
# Modules that may import torch inside a function, when they are asked to execute a module.
TORCH_ON_DEMAND = {"advisor.testing"}

STAGES = {"capture", "ingest", "correlate", "analyze", "match", "plan", "patch", "verify"}
# Modules that see several stages: they put a run, its report or an example together.
COMPOSERS = {
    "advisor.besides",
    "advisor.bot.handover",
    "advisor.bot.measure",
    "advisor.checking",
    "advisor.comparing",
    "advisor.doctor",
    "advisor.fileprofile",
    "advisor.job",
    "advisor.pipeline",
    "advisor.singles",
    "advisor.stages",
    "advisor.summary",
    "advisor.survey",
    "advisor.testing",
    "advisor.why",
}
# `advisor.source` and `advisor.alignment.align` hold types that a rule is handed, the others what several rules share.
_NOUNS = "model rule graphrule patterns usercode alignment codemod blocks source semantics glance attending libraries"
_NOUNS += " forms kernels regional roofline"
RULES_MAY_IMPORT = tuple(f"advisor.{name}" for name in _NOUNS.split())
REPORTS_MAY_IMPORT = ("advisor.model", "advisor.measured", "advisor.proposals", "advisor.reports")


@dataclass(frozen=True)
class Import:
    """One name a module imports: the absolute module, and whether that happens when the module is imported."""

    target: str
    at_import: bool
    line: int


def sources() -> dict[str, Path]:
    """Every module of the installed packages by its import name."""
    found = {}
    for folder in ("advisor", *MOUNTS.values()):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "advisor" else ("advisor", *parts))
            found[name.removesuffix(".__init__")] = path
    return {name: path for name, path in found.items() if not name.startswith("advisor.capture.site.")}


SOURCES = sources()


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def nodes(body: list[ast.stmt], at_import: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement with whether it runs when the module is imported; imports for types alone are left out."""
    for statement in body:
        if isinstance(statement, ast.If) and is_type_checking(statement.test):
            yield from nodes(statement.orelse, at_import)
            continue
        yield statement, at_import
        inside = at_import and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "orelse", "finalbody"):
            yield from nodes(getattr(statement, field, []), inside)
        for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from nodes(part.body, inside)


def imports(name: str) -> list[Import]:
    """What a module imports. `from advisor import x` counts as the module advisor.x where there is one."""
    path = SOURCES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node, at_import in nodes(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, at_import, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                module = f"{base}.{alias.name}"
                found.append(Import(module if module in SOURCES else base, at_import, node.lineno))
    return found


IMPORTS = {name: imports(name) for name in SOURCES}


def within(target: str, allowed: tuple[str, ...] | set[str]) -> bool:
    return any(target == item or target.startswith(f"{item}.") for item in allowed)


def stage_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "advisor" and parts[1] in STAGES else None


def place(name: str, item: Import) -> str:
    return f"{SOURCES[name].relative_to(ROOT)}:{item.line} imports {item.target}"


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --------------------------------------------------------------------------------------------------------------- build


def setuptools_table() -> dict[str, object]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert isinstance(table, dict)
    return table


def test_the_package_list_is_the_tree() -> None:
    assert {name.rpartition(".")[0] for name in SOURCES if "." in name} == set(setuptools_table()["packages"])  # type: ignore[call-overload]


def test_every_package_has_an_init() -> None:
    for package in setuptools_table()["packages"]:  # type: ignore[attr-defined]
        assert SOURCES[package].name == "__init__.py", f"{package} has no __init__.py"


def test_the_mounts_are_declared() -> None:
    assert setuptools_table()["package-dir"] == {"advisor": "advisor", **MOUNTS}
    assert setuptools_table()["include-package-data"] is False


def test_every_data_file_is_declared() -> None:
    declared = set()
    for package, patterns in setuptools_table()["package-data"].items():  # type: ignore[attr-defined]
        folder = ROOT / MOUNTS.get(package, package.replace(".", "/"))
        for pattern in patterns:
            matches = set(folder.glob(pattern))
            assert matches, f"{package}: nothing matches {pattern}"
            declared |= matches
    folders = [ROOT / folder for folder in ("advisor", *MOUNTS.values())]
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    data = {path for path in files if path not in SOURCES.values() and path.suffix != ".pyc"}
    assert data == {path for path in declared if path.is_file()}


@pytest.mark.parametrize("folder", MOUNTS.values())
def test_a_mounted_folder_refuses_its_own_name(folder: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {folder}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"ImportError: this folder is the package advisor.{folder}, not {folder}" in done.stderr


def test_the_rule_of_the_contributors_guide_holds(tmp_path: Path) -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code is not None
    (tmp_path / "foreach_off.py").write_text(code[1], encoding="utf-8")
    loaded, errors = registry.load(tmp_path)
    assert not errors
    testing.check(loaded["foreach-off"])


# ------------------------------------------------------------------------------------------------------------- weight


def test_importing_the_package_pulls_in_the_standard_library_only() -> None:
    code = "import sys; before = set(sys.modules); import advisor; print(*(set(sys.modules) - before))"
    added = {name.split(".")[0] for name in run_python("-c", code).split()}
    assert added <= {"advisor", *sys.stdlib_module_names}


def test_no_two_modules_of_the_tests_have_one_name() -> None:
    """They are imported by their bare names: of two with one name the second is not run."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = [path.name for folder in folders for path in folder.glob("*.py")]
    assert [name for name in names if names.count(name) > 1 and name != "conftest.py"] == []


def test_help_pulls_in_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['advisor', '--help']\n"
        "try:\n    import advisor.cli; advisor.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'libcst', 'networkx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert "optimize" in run_python("-c", code)


@pytest.mark.parametrize("command", ["rules", "explain optimizer-not-fused"])
def test_reading_rules_pulls_in_no_torch(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['advisor', *{command.split()!r}]\n"
        "try:\n    import advisor.cli; advisor.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert "optimizer" in run_python("-c", code)


def test_the_package_is_a_command() -> None:
    assert "optimize" in run_python("-m", "advisor", "--help")


# ------------------------------------------------------------------------------------------------------------- arrows


@pytest.mark.parametrize("name", ["advisor", "advisor.model", "advisor.errors"])
def test_the_nouns_import_the_standard_library_only(name: str) -> None:
    assert [place(name, i) for i in IMPORTS[name] if i.target.split(".")[0] not in sys.stdlib_module_names] == []


def test_torch_is_imported_in_the_child_only() -> None:
    found = [(name, i) for name, items in IMPORTS.items() for i in items if within(i.target, ("torch",))]
    wrong = [place(n, i) for n, i in found if n not in TORCH_IN_CHILD and (i.at_import or n not in TORCH_ON_DEMAND)]
    assert wrong == []
    assert {name for name, _ in found} == TORCH_IN_CHILD | TORCH_ON_DEMAND


def test_nothing_outside_the_child_imports_a_module_with_torch_at_import() -> None:
    wrong = [
        place(name, i)
        for name, items in IMPORTS.items()
        for i in items
        if i.target in TORCH_IN_CHILD and i.at_import and name not in TORCH_IN_CHILD
    ]
    assert wrong == []


def test_rules_import_the_nouns_of_the_engine_only() -> None:
    wrong = []
    for name in (n for n in SOURCES if n.startswith("advisor.rules.")):
        for item in IMPORTS[name]:
            if item.target.split(".")[0] not in sys.stdlib_module_names and not within(item.target, RULES_MAY_IMPORT):
                wrong.append(place(name, item))
    assert wrong == []


def test_reports_import_the_nouns_and_their_renderers_only() -> None:
    wrong = []
    for name in (n for n in SOURCES if within(n, ("advisor.reports",))):
        for item in IMPORTS[name]:
            top = item.target.split(".")[0]
            if top not in sys.stdlib_module_names | {"jinja2", "rich"} and not within(item.target, REPORTS_MAY_IMPORT):
                wrong.append(place(name, item))
    assert wrong == []


def test_nobody_imports_a_rule_by_name() -> None:
    wrong = [place(n, i) for n, items in IMPORTS.items() for i in items if within(i.target, ("advisor.rules",))]
    assert wrong == []
    text = re.compile(r"^\s*(?:from|import)\s+advisor\.rules\b|^\s*from\s+advisor\s+import\s+.*\brules\b", re.MULTILINE)
    tests = [path for path in (ROOT / "tests").rglob("*.py") if text.search(path.read_text(encoding="utf-8"))]
    assert tests == []


def test_the_engine_names_no_rule() -> None:
    ids = set(registry.load()[0])
    wrong = []
    for name, path in SOURCES.items():
        if within(name, ("advisor.rules", "advisor.skeleton")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in ids:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} names {node.value}")
    assert wrong == []


def test_stages_do_not_import_each_other() -> None:
    wrong = []
    for name, items in IMPORTS.items():
        here = stage_of(name)
        for item in items:
            there = stage_of(item.target)
            if there is not None and there != here and name not in COMPOSERS:
                wrong.append(place(name, item))
    assert wrong == []
