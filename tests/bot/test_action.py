"""The action and its workflows, carried out: real bash and git, the recorded measurement, a fake GitHub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakehub_git
import pytest
from benches import NAME, SETTINGS, TRAIN
from fakehub import FakeHub

pytest.importorskip("ruamel.yaml")
from actionrunner import ROOT, SAMPLES, Runner, evaluated, filled, load

HEAD = 'feature/it\'s $(touch pwned) `touch pwned` "x"'.replace(" ", "_")
MEASURE, PUBLISH = SAMPLES / "advisor-measure.yml", SAMPLES / "advisor-publish.yml"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "hub") as hub:
        hub.add_repository(NAME, permissions={"octocat": "write"})
        hub.commit(NAME, "main", {"train.py": TRAIN, "advisor.toml": SETTINGS}, "first")
        yield hub


def tip(hub: FakeHub, branch: str = "main") -> str:
    found = fakehub_git.commit_of(hub.repo(NAME).bare, f"refs/heads/{branch}")
    assert found is not None
    return found


def context(hub: FakeHub, **more: Any) -> dict[str, Any]:
    """What an event has of `github`; the payload of a schedule names no repository."""
    return {"repository": NAME, "api_url": hub.url, "ref_name": "main", "event": {}, **more}


def of_pull(hub: FakeHub, number: int) -> dict[str, Any]:
    pull = hub.sync(NAME).pulls[number]
    event = {"pull_request": {"head": {"sha": pull.head_sha}}, "repository": {"default_branch": "main"}}
    return context(hub, event=event, event_name="pull_request", base_ref="main", ref_name=f"{number}/merge")


def of_run(hub: FakeHub, sha: str, event: str) -> dict[str, Any]:
    """As the run of the second workflow sees the end of the first."""
    run = {"head_sha": sha, "event": event, "conclusion": "success"}
    return context(hub, event={"workflow_run": run, "repository": {"default_branch": "main"}}, sha=tip(hub))


def checkout(runner: Runner, hub: FakeHub, sha: str, *, depth: int = 0) -> None:
    """As actions/checkout with fetch-depth 0: every branch, and the commit, which may be a fork's."""
    into = runner.workspace
    fakehub_git.git(into, "init", "--quiet")
    fakehub_git.git(into, "remote", "add", "origin", hub.repo(NAME).clone_url)
    if depth:
        fakehub_git.git(into, "fetch", "--quiet", f"--depth={depth}", "origin", sha)
    else:
        fakehub_git.git(into, "fetch", "--quiet", "origin", "+refs/heads/*:refs/remotes/origin/*")
        fakehub_git.git(into, "fetch", "--quiet", "origin", sha)
    fakehub_git.git(into, "checkout", "--quiet", "--detach", sha)


def opened(hub: FakeHub, files: dict[str, str | None], branch: str = HEAD) -> int:
    hub.commit(NAME, branch, files)
    return hub.open_pull(NAME, head=branch).number


def measurer(hub: FakeHub, folder: Path, github: dict[str, Any], sha: str, *, depth: int = 0) -> Runner:
    runner = Runner(folder / "measure it", github)
    checkout(runner, hub, sha, depth=depth)
    return runner


def publisher(hub: FakeHub, folder: Path, measured: Runner, sha: str, event: str) -> Runner:
    """Another machine, with what the artifact holds."""
    runner = Runner(folder / "publish it", of_run(hub, sha, event))
    shutil.copytree(measured.workspace / "advisor-examination", runner.workspace / "advisor-examination")
    return runner


def rights(job: str) -> dict[str, str]:
    """Of the token of a job of the workflow that publishes, as the fake names them."""
    return {name.replace("-", "_"): right for name, right in load(PUBLISH)["jobs"][job]["permissions"].items()}


def noted(runner: Runner) -> Any:
    return json.loads((runner.notes / "measured.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------------- the flow


def test_a_pull_request_is_measured_in_one_job_and_published_from_another(hub: FakeHub, tmp_path: Path) -> None:
    left = tip(hub)
    number = opened(hub, {"note.py": "x = 1\n", "advisor/__init__.py": "raise SystemExit('theirs')\n"})
    hub.commit(NAME, "main", {"advisor.toml": SETTINGS + 'paths = ["*.py"]\n', "other.py": "x = 1\n"})  # meanwhile
    sha = hub.sync(NAME).pulls[number].head_sha
    runner = measurer(hub, tmp_path, of_pull(hub, number), sha)
    ran = runner.act(mode="measure")
    assert ran.status == 0, ran.said
    document = json.loads((runner.workspace / "advisor-examination" / "examination.json").read_bytes())
    assert (document["base"], document["head"], document["purpose"]) == (left, sha, "examine")
    assert noted(runner)["cwd"].endswith("/advisor/head")
    assert not noted(runner)["seen"]
    (stop,) = set(re.findall(r"(?m)^::stop-commands::([0-9a-f]{64})$", ran.said))
    assert ran.said.index("::stop-commands") < ran.said.index("::add-mask::base") < ran.said.index(f"\n::{stop}::")
    second = publisher(hub, tmp_path, runner, sha, "pull_request")
    token = hub.workflow_token(rights("examine"))
    for _ in range(2):  # as a run that is repeated
        ran = second.act(mode="publish", token=token)
        assert ran.status == 0, ran.said
    assert f"#{number} examined" in ran.said
    assert token not in ran.said
    (comment,) = hub.sync(NAME).of(number)
    assert "naive-attention" in comment.body
    assert hub.repo(NAME).check("advisor", sha) is not None
    assert not list(tmp_path.rglob("pwned"))
    assert "seen" not in (second.notes / "pip").read_text(encoding="utf-8")


def test_a_fork_and_a_pull_request_that_moved_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.commit(NAME, "main", {"advisor.toml": SETTINGS + "forks = true\n"})
    hub.fork(NAME, "guest")
    hub.commit("guest/model", "main", {"note.py": "x = 1\n"})
    number = hub.open_pull(NAME, head="main", head_repo="guest/model", author="guest").number
    sha = hub.sync(NAME).pulls[number].head_sha
    runner = measurer(hub, tmp_path, of_pull(hub, number), sha)
    ran = runner.act(mode="measure")
    assert ran.status == 0, ran.said
    second = publisher(hub, tmp_path, runner, sha, "pull_request")
    token = hub.workflow_token(rights("examine"))
    assert f"#{number} examined" in second.act(mode="publish", token=token).said
    hub.commit("guest/model", "main", {"note.py": "x = 2\n"})
    ran = second.act(mode="publish", token=token)
    assert (ran.status, "no open pull request" in ran.said) == (0, True)
    assert len(hub.sync(NAME).of(number)) == 1


def test_on_a_schedule_the_default_branch_is_proposed_to(hub: FakeHub, tmp_path: Path) -> None:
    github = context(hub, event={"schedule": "17 3 * * 1"}, event_name="schedule", sha=tip(hub))
    runner = measurer(hub, tmp_path, github, tip(hub))
    ran = runner.act(mode="measure", purpose="propose")
    assert ran.status == 0, ran.said
    second = publisher(hub, tmp_path, runner, tip(hub), "schedule")
    ran = second.act(mode="publish", purpose="propose", token=hub.workflow_token(rights("propose")))
    assert ran.status == 0, ran.said
    assert "1 proposed" in ran.said
    (pull,) = hub.sync(NAME).pulls.values()
    assert pull.head.startswith("advisor/naive-attention-")


def test_the_token_that_meets_what_a_pull_request_brought_about_can_push_nothing() -> None:
    assert rights("examine")["contents"] == "read"
    assert "issues" not in rights("examine")


def test_actions_that_may_not_open_pull_requests_say_so_and_leave_no_branch(hub: FakeHub, tmp_path: Path) -> None:
    runner = measurer(hub, tmp_path, context(hub, sha=tip(hub)), tip(hub))
    assert runner.act(mode="measure", purpose="propose").status == 0
    said = {"message": "GitHub Actions is not permitted to create or approve pull requests."}
    hub.fail("POST", r"/pulls$", 403, body=said, times=9)
    second = publisher(hub, tmp_path, runner, tip(hub), "schedule")
    ran = second.act(mode="publish", purpose="propose", token=hub.workflow_token())
    assert "GitHub Actions is not permitted to create" in ran.said
    assert not hub.sync(NAME).pulls
    assert set(fakehub_git.heads(hub.repo(NAME).bare)) == {"main"}


# --------------------------------------------------------------------------------------------------------- the checkout


def test_without_credentials_the_base_branch_is_the_one_that_was_checked_out(hub: FakeHub, tmp_path: Path) -> None:
    """Of a private repository with `persist-credentials: false` nothing more can be fetched."""
    number = opened(hub, {"note.py": "x = 1\n"})
    sha = hub.sync(NAME).pulls[number].head_sha
    runner = measurer(hub, tmp_path, of_pull(hub, number), sha)
    fakehub_git.git(runner.workspace, "remote", "set-url", "origin", f"file://{tmp_path}/private.git")
    ran = runner.act(mode="measure")
    assert ran.status == 0, ran.said
    assert json.loads((runner.workspace / "advisor-examination" / "examination.json").read_bytes())["head"] == sha


def test_the_same_workspace_again_after_the_runner_emptied_its_own_folder(hub: FakeHub, tmp_path: Path) -> None:
    number = opened(hub, {"note.py": "x = 1\n"})
    sha = hub.sync(NAME).pulls[number].head_sha
    runner = measurer(hub, tmp_path, of_pull(hub, number), sha)
    assert runner.act(mode="measure").status == 0
    assert runner.act(mode="measure").status == 0
    shutil.rmtree(runner.folder / "temp")
    (runner.folder / "temp").mkdir()
    ran = runner.act(mode="measure")
    assert ran.status == 0, ran.said


def test_a_checkout_of_another_account_as_in_a_container(hub: FakeHub, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can hand a checkout to another account")
    number = opened(hub, {"note.py": "x = 1\n"})
    runner = measurer(hub, tmp_path, of_pull(hub, number), hub.sync(NAME).pulls[number].head_sha)
    subprocess.run(["chown", "-R", "1001:1001", str(runner.workspace)], check=True)
    ran = runner.act(mode="measure")
    assert ran.status == 0, ran.said


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallow_checkout_is_refused_with_what_to_do(hub: FakeHub, tmp_path: Path, depth: int) -> None:
    hub.commit(NAME, "main", {"other.py": "x = 1\n"})
    number = opened(hub, {"note.py": "x = 1\n"})
    runner = measurer(hub, tmp_path, of_pull(hub, number), hub.sync(NAME).pulls[number].head_sha, depth=depth)
    ran = runner.act(mode="measure")
    assert (ran.status, "fetch-depth: 0" in ran.said) == (2, True)


def test_where_the_base_branch_has_not_turned_the_bot_on_nothing_fails(hub: FakeHub, tmp_path: Path) -> None:
    """Such as in the pull request that brings the workflows and the settings."""
    hub.commit(NAME, "main", {"advisor.toml": None})
    number = opened(hub, {"advisor.toml": SETTINGS, "note.py": "x = 1\n"})
    sha = hub.sync(NAME).pulls[number].head_sha
    runner = measurer(hub, tmp_path, of_pull(hub, number), sha)
    ran = runner.act(mode="measure")
    assert (ran.status, "nothing is measured" in ran.said) == (0, True), ran.said
    assert list((runner.workspace / "advisor-examination").iterdir()) == []
    second = publisher(hub, tmp_path, runner, sha, "pull_request")
    ran = second.act(mode="publish", token=hub.workflow_token())
    assert (ran.status, "::notice::nothing was measured" in ran.said) == (0, True), ran.said
    assert not hub.sync(NAME).of(number)


# ----------------------------------------------------------------------------------------------------------- the inputs


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"mode": "both"}, "mode must be"),
        ({"mode": "measure", "purpose": "$(touch pwned)"}, "purpose must be"),
        ({"mode": "measure", "token": "ghs_x"}, "measure runs code that is not trusted"),
        ({"mode": "measure", "head": "main"}, "head must be a full commit id"),
        ({"mode": "measure", "head": "--output=pwned"}, "head must be a full commit id"),
        ({"mode": "measure", "base_ref": ""}, "base-ref must be"),
        ({"mode": "measure", "base_ref": "main:refs/heads/x"}, "base-ref must be"),
        ({"mode": "measure", "base_ref": "no-such-branch"}, "the base branch is not in the checkout"),
        ({"mode": "measure", "base_ref": "$(touch${IFS}pwned)`touch${IFS}pwned`\"'"}, "the base branch is not in"),
        ({"mode": "measure", "python": "no/such python"}, "there is no such interpreter"),
        ({"mode": "measure", "head": "1" * 40}, "head is not in the checkout"),
        ({"mode": "publish"}, "publish needs a token"),
        ({"mode": "publish", "token": "x", "folder": ""}, "folder must not be empty"),
    ],
)
def test_inputs_that_are_wrong_are_said_and_carry_nothing_out(
    hub: FakeHub, tmp_path: Path, inputs: dict[str, str], said: str
) -> None:
    runner = measurer(hub, tmp_path, context(hub, sha=tip(hub)), tip(hub))
    ran = runner.act(**inputs)
    assert ran.status == 2, ran.said
    assert f"::error::{said}" in ran.said
    assert not list(tmp_path.rglob("pwned"))
    assert not (runner.notes / "pip").exists()


def test_a_folder_and_an_interpreter_with_blanks_and_quotes(hub: FakeHub, tmp_path: Path) -> None:
    runner = measurer(hub, tmp_path, context(hub, sha=tip(hub)), tip(hub))
    odd = 'it\'s "here" $(touch pwned)'
    (runner.workspace / odd).mkdir()
    shutil.copy(runner.folder / "bin" / "python3", runner.workspace / odd / "python")
    ran = runner.act(mode="measure", purpose="propose", python=f"{odd}/python", folder=f"{odd}/out")
    assert ran.status == 0, ran.said
    assert (runner.workspace / odd / "out" / "examination.json").is_file()
    assert not list(tmp_path.rglob("pwned"))


def test_what_lies_beside_the_artifact_is_not_run(hub: FakeHub, tmp_path: Path) -> None:
    """A pull request can change the workflow that measures it, and so fill the artifact with what it likes."""
    runner = Runner(tmp_path / "publish", of_run(hub, tip(hub), "pull_request"))
    for name in ("venv", "pip", "advisor", "secrets", "json"):
        for place in (runner.workspace, runner.workspace / "advisor-examination"):
            (place / name).mkdir(parents=True)
            (place / name / "__init__.py").write_text("open('pwned', 'w')\n", encoding="utf-8")
    ran = runner.act(mode="publish", token=hub.workflow_token())
    assert "nothing was measured" in ran.said
    (runner.workspace / "advisor-examination" / "examination.json").write_text("[" * 100_000, encoding="utf-8")
    ran = runner.act(mode="publish", token=hub.workflow_token())
    assert "no open pull request" in ran.said
    assert not list(tmp_path.rglob("pwned"))
    number = opened(hub, {"note.py": "x = 1\n"})
    runner.github = of_run(hub, hub.sync(NAME).pulls[number].head_sha, "pull_request")
    ran = runner.act(mode="publish", token=hub.workflow_token())
    assert ran.status != 0
    assert "is damaged" in ran.said
    assert not hub.sync(NAME).of(number)


# -------------------------------------------------------------------------------------------------------- the workflows


def pinned(folder: Path) -> list[str]:
    """The three files with a pinned action in place of the placeholder."""
    found = []
    for path in (ROOT / "action.yml", MEASURE, PUBLISH):
        text = path.read_text(encoding="utf-8").replace("OWNER/advisor@COMMIT", f"acme/advisor@{'0123456789' * 4}")
        (folder / path.name).write_text(text, encoding="utf-8")
        found.append(str(folder / path.name))
    return found


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_they_are_what_github_takes_and_zizmor_finds_nothing(tmp_path: Path) -> None:
    files = pinned(tmp_path)
    check = [tool("check-jsonschema"), "--builtin-schema"]
    subprocess.run([*check, "vendor.github-actions", files[0]], check=True)
    subprocess.run([*check, "vendor.github-workflows", *files[1:]], check=True)
    done = subprocess.run(
        [tool("zizmor"), "--offline", "--no-progress", "--collect=all", "--min-severity=low", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_no_expression_stands_in_a_script() -> None:
    for step in load(ROOT / "action.yml")["runs"]["steps"]:
        assert "${{" not in step["run"]
        subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)


def test_only_the_step_that_publishes_has_the_token() -> None:
    steps = load(ROOT / "action.yml")["runs"]["steps"]
    holders = [step["name"] for step in steps if "ADVISOR_TOKEN" in step.get("env", {})]
    assert holders == ["Publish"]


def test_the_second_workflow_waits_for_the_first_and_takes_what_it_left() -> None:
    measure, publish = load(MEASURE), load(PUBLISH)
    assert publish["on"]["workflow_run"]["workflows"] == [measure["name"]]
    assert measure["permissions"] == publish["permissions"] == {}
    (job,) = measure["jobs"].values()
    assert set(job["permissions"].items()) == {("contents", "read")}
    left = next(step["with"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    for job in publish["jobs"].values():
        taken = job["steps"][0]["with"]
        assert taken["pattern"] == left["name"]
        assert f"{taken['path']}/examination.json" == left["path"]
        assert taken["path"] == load(ROOT / "action.yml")["inputs"]["folder"]["default"]


@pytest.mark.parametrize(
    ("event", "conclusion", "runs"),
    [
        ("pull_request", "success", ["examine"]),
        ("schedule", "success", ["propose"]),
        ("workflow_dispatch", "success", ["propose"]),
        ("pull_request", "failure", []),
        ("pull_request", "cancelled", []),
    ],
)
def test_which_job_publishes(event: str, conclusion: str, runs: list[str]) -> None:
    github = {"event": {"workflow_run": {"event": event, "conclusion": conclusion}}}
    jobs = load(PUBLISH)["jobs"]
    assert [name for name, job in jobs.items() if evaluated(job["if"], {"github": github})] == runs


@pytest.mark.parametrize(
    ("event", "home", "draft", "runs", "purpose"),
    [
        ("pull_request", NAME, False, True, "examine"),
        ("pull_request", NAME, True, False, "examine"),
        ("pull_request", "guest/model", False, False, "examine"),
        ("schedule", None, None, True, "propose"),
        ("workflow_dispatch", None, None, True, "propose"),
    ],
)
def test_which_events_are_measured(event: str, home: str | None, draft: bool, runs: bool, purpose: str) -> None:
    pull = {"pull_request": {"draft": draft, "head": {"sha": "1", "repo": {"full_name": home}}}} if home else {}
    github = {"event_name": event, "repository": NAME, "event": pull, "sha": "2"}
    (job,) = load(MEASURE)["jobs"].values()
    assert evaluated(job["if"], {"github": github}) is runs
    steps = {step.get("uses", "run").partition("@")[0]: step.get("with") for step in job["steps"]}
    assert filled(steps["OWNER/advisor"]["purpose"], {"github": github}) == purpose
    assert filled(steps["actions/checkout"]["ref"], {"github": github}) == ("1" if home else "2")
    assert (steps["actions/checkout"]["fetch-depth"], steps["actions/checkout"]["persist-credentials"]) == (0, False)
