"""The nearest configuration is found, checked key by key, and overridden by options."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from advisor import config as module
from advisor.config import BotConfig, Config, load_config, merge
from advisor.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults(tmp_path: Path) -> None:
    assert load_config(tmp_path) == Config()
    assert Config().allow == ("numerics", "precision")
    assert (Config().steps, Config().profile_steps, Config().warmup, Config().time_s) == (8, 2, 3, 270.0)


def test_every_setting_has_a_kind() -> None:
    for defaults, kinds in ((Config(), module._KINDS), (Config().bot, module._BOT)):
        names = {field.name for field in dataclasses.fields(defaults)} - {"bot"}
        assert set(kinds) == names
        for name in names:
            value = getattr(defaults, name)
            value = list(value) if value == () else value
            assert value in (None, []) or kinds[name].accepts(value)


def test_the_table_of_the_bot(tmp_path: Path) -> None:
    text = '[tool.advisor]\nsteps = 4\n[tool.advisor.bot]\nenabled = true\nscripts = ["train.py --n 1"]\nlabels = []\n'
    write(tmp_path / "pyproject.toml", text)
    config = load_config(tmp_path)
    assert (config.steps, config.bot) == (4, BotConfig(enabled=True, scripts=("train.py --n 1",), labels=()))
    write(tmp_path / "advisor.toml", "[bot]\nmax_open = 1\n")
    assert load_config(tmp_path).bot.max_open == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bot = 1", "bot must be a table"),
        ("[bot]\nmax-open = 1", "[bot]: unknown key 'max-open'; did you mean 'max_open'?"),
        ("[bot]\nschedule = 'hourly'", "schedule must be one of never, daily, weekly"),
        ("[bot]\nscripts = ['train.py \"']", "scripts must be an array of commands"),
        ("[bot]\nscripts = ['']", "scripts must be an array of commands"),
        ("[bot]\nmax_open = 0", "max_open must be a whole number of at least 1"),
        ("bot.bot = {}", "unknown key 'bot'"),
    ],
)
def test_what_is_wrong_with_the_table_of_the_bot(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "advisor.toml", text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(tmp_path)


def test_the_table_in_pyproject(tmp_path: Path) -> None:
    write(
        tmp_path / "pyproject.toml",
        '[tool.other]\nx = 1\n[tool.advisor]\nsteps = 16\ntime_s = 90\nallow = ["numerics"]\nbaselines = false\n'
        'worth = 0.05\nselect = ["unfused-adam"]\npeak_flops = 989.4e12\n',
    )
    config = load_config(tmp_path)
    assert config == Config(
        steps=16,
        time_s=90.0,
        allow=("numerics",),
        baselines=False,
        worth=0.05,
        select=("unfused-adam",),
        peak_flops=989.4e12,
    )
    assert isinstance(config.time_s, float)


def test_the_nearest_file_wins_and_a_foreign_pyproject_does_not_end_the_search(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[tool.advisor]\nsteps = 4\n")
    write(tmp_path / "a" / "pyproject.toml", "[tool.ruff]\nline-length = 120\n")
    (tmp_path / "a" / "b").mkdir()
    script = write(tmp_path / "a" / "b" / "train.py", "")
    assert load_config(tmp_path / "a" / "b").steps == 4
    write(tmp_path / "a" / "advisor.toml", "steps = 5\n")
    write(tmp_path / "a" / "pyproject.toml", "[tool.advisor]\nsteps = 6\n")
    assert load_config(tmp_path / "a" / "b").steps == 5
    assert load_config(script).steps == 5


def test_paths_are_taken_from_the_file(tmp_path: Path) -> None:
    write(tmp_path / "advisor.toml", 'rules_folder = "tools/rules"\nout = "/runs"\npython = ".venv/bin/python"\n')
    config = load_config(tmp_path)
    assert config.rules_folder == str(tmp_path / "tools/rules")
    assert Path(config.out or "") == Path("/runs")
    assert config.python == str(tmp_path / ".venv/bin/python")
    write(tmp_path / "advisor.toml", 'python = "python3.12"\n')
    assert load_config(tmp_path).python == "python3.12"


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ("stepz = 3", "stepz", "did you mean 'steps'?"),
        ("profile-steps = 3", "profile-steps", "did you mean 'profile_steps'?"),
        ("Seed = 3", "Seed", "did you mean 'seed'?"),
        ("qqqqqq = 3", "qqqqqq", "the keys are allow, baselines"),
        ("steps = true", "steps", "a whole number of at least 1, found True"),
        ("steps = 0", "steps", "a whole number of at least 1, found 0"),
        ("steps = 2.5", "steps", "found 2.5"),
        ("warmup = -1", "warmup", "at least 0"),
        ('time_s = "10"', "time_s", "a finite number above 0, found '10'"),
        ("time_s = inf", "time_s", "a finite number above 0"),
        ("time_s = nan", "time_s", "a finite number above 0"),
        ("worth = 2", "worth", "a number from 0 to 1"),
        ('allow = "numerics"', "allow", "an array of safety levels"),
        ('allow = ["fast"]', "allow", "exact, numerics, precision, semantics"),
        ('allow = ["suggest"]', "allow", "an array of safety levels"),
        ('select = ["a", 3]', "select", "an array of non-empty strings"),
        ("baselines = 1", "baselines", "true or false"),
        ('out = ""', "out", "a non-empty string"),
        ("python = 3", "python", "a non-empty string"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, key: str, says: str) -> None:
    path = write(tmp_path / "advisor.toml", line + "\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert key in message
    assert says in message
    assert caught.value.exit_status == 2


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    path = write(tmp_path / "advisor.toml", "steps = \n")
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        load_config(tmp_path)
    assert str(path) in str(caught.value)
    path.write_bytes(b"out = '\xff'\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path)
    path.unlink()
    write(tmp_path / "pyproject.toml", "[tool]\nadvisor = 3\n")
    with pytest.raises(ConfigError, match="must be a table, found 3"):
        load_config(tmp_path)


def test_options_override_and_none_does_not() -> None:
    config = merge(Config(steps=4), steps=None, warmup=0, allow=["semantics"], baselines=False, time_s=5)
    assert config == Config(steps=4, warmup=0, allow=("semantics",), baselines=False, time_s=5.0)
    with pytest.raises(ConfigError, match="unknown key 'step'; did you mean 'steps'"):
        merge(Config(), step=3)
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        merge(Config(), steps=-3)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3  # type: ignore[misc]
