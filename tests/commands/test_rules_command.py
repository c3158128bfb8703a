"""`advisor rules new` and `advisor rules check`: a skeleton that holds what it says, and what an author is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from advisor import registry, skeleton, testing
from advisor.cli import cli
from advisor.errors import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def advisor(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def written(folder: Path, text: str, name: str = "slow_thing.py") -> None:
    (folder / name).write_text(text, encoding="utf-8")


def filled_in() -> str:
    return skeleton.text_of("slow-thing").replace(skeleton.FILL_IN, "Said")


def test_the_skeleton_loads_is_explained_and_says_what_to_fill_in(here: Path) -> None:
    done = advisor("rules", "new", "slow-thing", "--rules", "mine")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "wrote mine/slow_thing.py"
    page = advisor("explain", "slow-thing", "--rules", "mine")
    assert page.exit_code == 0
    assert page.output.startswith("# slow-thing\n")
    for heading in registry.HEADINGS:
        assert f"## {heading}\n" in page.output
    assert page.output.count(skeleton.FILL_IN) == 1 + len(registry.HEADINGS)
    assert "slow-thing" in advisor("rules", "--rules", "mine").output


def test_the_examples_of_the_skeleton_pass_and_its_page_does_not(here: Path) -> None:
    skeleton.write("slow-thing", here)
    (item,) = [item for name, item in registry.load(here)[0].items() if name == "slow-thing"]
    for example in item.rule.examples:
        testing.run_example(item.rule, example)
    done = advisor("rules", "check", "slow-thing", "--rules", ".")
    assert done.exit_code == 5
    assert f"slow-thing: the page still says {skeleton.FILL_IN}" in done.output
    written(here, filled_in())
    done = advisor("rules", "check", "slow-thing", "optimizer-not-fused", "--rules", ".")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "slow-thing: 2 examples pass"


def test_the_skeleton_is_in_the_style_of_the_project(here: Path) -> None:
    pytest.importorskip("ruff")
    path = skeleton.write("slow-thing", here)
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *check, *settings, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_there_stays(here: Path) -> None:
    written(here, "# mine\n")
    done = advisor("rules", "new", "slow-thing", "--rules", ".")
    assert done.exit_code == 2
    assert "is there already" in done.output
    assert (here / "slow_thing.py").read_text(encoding="utf-8") == "# mine\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("naive-attention", "--rules", "."), "there is a rule naive-attention already"),
        (("SlowThing", "--rules", "."), "can be no id of a rule"),
        (("../slow", "--rules", "."), "can be no id of a rule"),
        (("slow-thing",), "name the folder of your rules"),
    ],
)
def test_a_name_or_a_folder_that_cannot_be(here: Path, arguments: tuple[str, ...], words: str) -> None:
    done = advisor("rules", "new", *arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert not list(here.iterdir())


def test_the_folder_of_the_settings_is_that_of_all_commands(here: Path) -> None:
    (here / "advisor.toml").write_text('rules_folder = "team"\n', encoding="utf-8")
    (here / "team").mkdir()
    assert advisor("rules", "new", "slow-thing").output.splitlines()[0] == "wrote team/slow_thing.py"
    written(here / "team", filled_in())
    assert advisor("rules", "check", "slow-thing").exit_code == 0
    assert advisor("explain", "slow-thing").exit_code == 0
    assert "slow-thing" in advisor("rules").output


def test_in_the_checkout_a_rule_begins_among_the_built_in_ones(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "built_in_folder", lambda: here / "rules")
    assert advisor("rules", "new", "slow-thing").output.splitlines() == [
        "wrote rules/slow_thing.py",
        "fill it in, then: advisor rules check slow-thing; advisor explain slow-thing",
    ]


def test_a_rule_that_lacks_a_method_is_no_silent_gap(here: Path) -> None:
    written(here, filled_in().replace("def match(", "def matches("))
    done = advisor("explain", "slow-thing", "--rules", ".")
    assert done.exit_code == 5
    assert "SlowThing has no match" in done.output


def test_a_base_of_the_authors_own_may_leave_methods_open(here: Path) -> None:
    base = "\n\nclass Base(Rule):\n    pass\n\n\nclass SlowThing(Base):"
    written(here, filled_in().replace("\n\nclass SlowThing(Rule):", base))
    assert advisor("rules", "check", "slow-thing", "--rules", ".").exit_code == 0


def test_a_file_without_a_rule_is_named_when_its_rule_is_asked_for(here: Path) -> None:
    written(here, filled_in().replace("class SlowThing(Rule)", "class SlowThing"))
    assert advisor("rules", "--rules", ".").exit_code == 0  # what helps other rules
    done = advisor("explain", "slow-thing", "--rules", ".")
    assert done.exit_code == 2
    assert "slow_thing.py holds no rule" in done.output


def test_a_traceback_begins_in_the_file_of_the_author(here: Path) -> None:
    written(here, "x = = 1\n")
    done = advisor("rules", "--rules", ".")
    assert done.exit_code == 5
    assert "slow_thing.py" in done.output and "registry.py" not in done.output
    written(here, "x = 1 / 0\n")
    done = advisor("rules", "--rules", ".")
    assert done.exit_code == 5
    assert "x = 1 / 0" in done.output and "registry.py" not in done.output


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"True", "False"', '"True", "None"', "+opt = torch.optim.AdamW(params, slow=False)"),
        ("0.2% of", "0.3% of", "declined with"),
        ("cited_us=use.step_us", "cited_us=0.0", "it is above 0 and at most the step"),
        ("yield self._judge(ctx, use)", "return [self._judge(ctx, use)]", "yield findings and declines"),
        ("yield self._judge(ctx, use)", "return None", "yield findings and declines"),
        ("return self.edit(", "return (", "no edit, rewrite gave"),
        ("share = use", "self.seen = share = use", "the rule changed itself"),
        ("ctx.profile.optimizers:", "ctx.profile.optimisers:", "raised AttributeError"),
        ("order = 60", 'order = "late"', "its order"),
        ("## References", "## Links", "lacks the headings ['References']"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(here: Path, old: str, new: str, words: str) -> None:
    text = filled_in()
    assert old in text
    written(here, text.replace(old, new))
    done = advisor("rules", "check", "slow-thing", "--rules", ".")
    assert done.exit_code == 5
    assert words in done.output


def test_names_are_lower_case_words() -> None:
    assert "class TwoWords2(Rule):" in skeleton.text_of("two-words2")
    for name in ("", "-a", "a-", "a--b", "a_b", "1a", "a.b"):
        with pytest.raises(UsageError):
            skeleton.text_of(name)
