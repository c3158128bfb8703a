"""A fast part of the exam on installed packages, and that the keys of all of it fit their scripts."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from results import expectations, row
from run_models import HERE, recipes
from run_packages import examine, key

FAST = ("hf_llama", "hf_gpt2", "hf_bert", "hf_t5", "timm_vit", "kernelbench_form")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_package(name: str) -> None:
    for package in key()[name]["packages"]:
        _skip_unless_importable(package.replace("-", "_"))
    entry = key()[name]
    graded = row(name, "", expectations(entry["key"]), examine(name)[0])
    assert not graded.answer.trouble
    assert not graded.grade.missed
    assert not [(wrong.rule, wrong.places, wrong.text) for wrong in graded.grade.wrong]


def _skip_unless_importable(package: str) -> None:
    if package == "torchvision":  # its CUDA build has no operators on a CPU torch: the scripts help themselves
        if importlib.util.find_spec(package) is None:
            pytest.skip("torchvision is not installed")
        return
    pytest.importorskip(package)


@pytest.mark.parametrize("name", key())
def test_every_package_script_has_its_key(name: str) -> None:
    entry = key()[name]
    script = HERE / "scripts" / f"{name}.py"
    lines = len(script.read_text(encoding="utf-8").splitlines())
    for wanted in expectations(entry["key"]):
        assert wanted.answer in ("find", "say", "refuse", "may")
        assert wanted.lines is None or wanted.lines[0] <= wanted.lines[1]
        if wanted.file == script.name and wanted.lines is not None:
            assert wanted.lines[1] <= lines


def test_scripts_and_keys_are_the_same_set() -> None:
    assert _stems(HERE / "scripts") == set(key())
    assert _stems(HERE / "recipes") == {name for _, name, _ in recipes()}


def _stems(folder: Path) -> set[str]:
    for path in folder.glob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"))
    return {path.stem for path in folder.glob("*.py")}
