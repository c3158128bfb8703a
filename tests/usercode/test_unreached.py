"""What of an imported file cannot run."""

from __future__ import annotations

import pytest

from advisor.source import Source
from advisor.usercode.unreached import unreached

MODEL = """\
def build():
    return helper()

def helper():
    return 1

def main():
    train(build())

def train(model):
    return train

if __name__ == "__main__":
    main()
"""


def names(script: str, model: str = MODEL) -> set[str]:
    sources = [Source("model.py", model), Source("run.py", script)]
    return {getattr(s, "name", "start") for s in unreached(sources, "run.py")}


def test_what_only_the_file_s_own_start_calls() -> None:
    assert names("from model import build\ndef main():\n    build()\nmain()\n") == {"start", "main", "train"}


@pytest.mark.parametrize(
    "script",
    [
        "import model\nmodel.main()\n",
        "from model import main\n",
        "from model import *\nmain()\n",
        'import importlib\ngetattr(importlib.import_module("model"), "main")()\n',
        'entry = "model:main"\n',
    ],
)
def test_what_the_script_can_name(script: str) -> None:
    assert "main" not in names(script)
    assert "train" not in names(script)


def test_decorated_functions_may_be_registered() -> None:
    assert "main" not in names("import model\n", MODEL.replace("def main", "@register\ndef main"))


def test_the_script_itself_runs() -> None:
    assert unreached([Source("run.py", MODEL)], "run.py") == frozenset()
    assert unreached([Source("run.py", MODEL)], None) == frozenset()


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("import models, sys\nmodels.__dict__[sys.argv[1]]()\n", ""),
        ("from zoo import models\ngetattr(models, f'build_{name}')()\n", ""),
        ("import models as m\nfound = vars(m)\n", ""),
        ("import importlib, sys\nm = importlib.import_module(sys.argv[1])\ngetattr(m, sys.argv[1])()\n", ""),
        ("import models\nmodels.run('a')\n", "def run(name):\n    return globals()['build_' + name]()\n"),
    ],
)
def test_functions_that_are_found_by_a_computed_name(script: str, module: str) -> None:
    sources = (Source("train.py", script), Source("models.py", f"def build_a():\n    pass\n\n\n{module}"))
    assert not unreached(sources, "train.py")


def test_names_that_are_looked_up_in_a_library() -> None:
    script = "import torch\nimport models\nkind = getattr(torch, models.name)\n"
    sources = (
        Source("train.py", script),
        Source("models.py", "def __getattr__(n):\n    pass\n\n\ndef other():\n    pass\n"),
    )
    assert [getattr(node, "name", None) for node in unreached(sources, "train.py")] == ["other"]


@pytest.mark.parametrize(
    "script",
    [
        "import runpy\nrunpy.run_path('model.py', run_name='__main__')\n",
        "from runpy import run_module as start\nstart('model', run_name='__main__')\n",
        "exec(compile(open('model.py').read(), 'model.py', 'exec'))\n",
    ],
)
def test_a_launcher_starts_another_file(script: str) -> None:
    assert not names(script)
