"""Cut GitHub's published OpenAPI description to what the bot uses: `make_github.py node_modules/@octokit/openapi`.

The description is that of the npm package @octokit/openapi (MIT). What is left out: other operations, prose, examples,
schemas that nothing refers to any more. What is added: every JSON answer is listed a second time under the media type
that clients ask for, because Prism answers 406 to `Accept: application/vnd.github+json` otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = "/repos/{owner}/{repo}"
OPERATIONS = {
    "/user": "get",
    "/app": "get",
    "/app/installations/{installation_id}/access_tokens": "post",
    REPOSITORY: "get",
    f"{REPOSITORY}/installation": "get",
    f"{REPOSITORY}/git/ref/{{ref}}": "get",
    f"{REPOSITORY}/git/refs/{{ref}}": "delete",
    f"{REPOSITORY}/contents/{{path}}": "get",
    f"{REPOSITORY}/collaborators/{{username}}/permission": "get",
    f"{REPOSITORY}/commits/{{commit_sha}}/pulls": "get",
    f"{REPOSITORY}/commits/{{ref}}/check-runs": "get",
    f"{REPOSITORY}/check-runs": "post",
    f"{REPOSITORY}/check-runs/{{check_run_id}}": "get patch",
    f"{REPOSITORY}/check-runs/{{check_run_id}}/annotations": "get",
    f"{REPOSITORY}/code-scanning/sarifs": "post",
    f"{REPOSITORY}/issues": "get post",
    f"{REPOSITORY}/issues/{{issue_number}}": "patch",
    f"{REPOSITORY}/issues/{{issue_number}}/comments": "get post",
    f"{REPOSITORY}/issues/{{issue_number}}/labels": "post",
    f"{REPOSITORY}/issues/comments/{{comment_id}}": "patch delete",
    f"{REPOSITORY}/issues/comments/{{comment_id}}/reactions": "post",
    f"{REPOSITORY}/pulls": "get post",
    f"{REPOSITORY}/pulls/{{pull_number}}": "get patch",
    f"{REPOSITORY}/pulls/{{pull_number}}/files": "get",
    f"{REPOSITORY}/pulls/{{pull_number}}/comments": "get",
    f"{REPOSITORY}/pulls/{{pull_number}}/reviews": "post",
}
_PROSE = ("description", "example", "examples", "externalDocs", "summary", "tags", "title", "deprecated", "callbacks")
_MEDIA = "application/vnd.github+json"


def without_prose(value: Any, *, names: bool = False) -> Any:
    """The description without prose, examples and extensions; `names` says that keys are names, not keywords."""
    if isinstance(value, list):
        return [without_prose(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if names or not (k in _PROSE or k.startswith("x-"))}
    return {k: without_prose(v, names=k in ("properties", "schemas", "mapping") and not names) for k, v in kept.items()}


def references(value: Any) -> set[str]:
    """Every `$ref` below a value."""
    if isinstance(value, list):
        return {found for item in value for found in references(item)}
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return own | {found for item in value.values() for found in references(item)}


def subset(description: dict[str, Any]) -> dict[str, Any]:
    """The description of the operations above with what they refer to."""
    paths: dict[str, Any] = {}
    for path, verbs in OPERATIONS.items():
        found = description["paths"][path]
        paths[path] = {verb: without_prose(found[verb]) for verb in verbs.split()}
    kept: dict[str, dict[str, Any]] = {}
    wanted, seen = references(paths), set[str]()
    while wanted:
        reference = wanted.pop()
        seen.add(reference)
        _, _, kind, name = reference.split("/")
        part = without_prose(description["components"][kind][name])
        kept.setdefault(kind, {})[name] = part
        wanted |= references(part) - seen
    answers = [a for path in paths.values() for operation in path.values() for a in operation["responses"].values()]
    for answer in (*answers, *kept.get("responses", {}).values()):
        answer.setdefault("description", "")  # OpenAPI requires one
        content = answer.get("content", {})
        if "application/json" in content:
            content[_MEDIA] = content["application/json"]
    return {
        "openapi": description["openapi"],
        "info": {
            "title": "GitHub's REST API, the operations that the bot uses",
            "version": description["info"]["version"],
            "description": (
                "Cut from generated/api.github.com.json of the npm package @octokit/openapi by make_github.py. "
                "MIT License, Copyright (c) 2020 Octokit contributors. Made from "
                "https://github.com/github/rest-api-description, MIT License, Copyright (c) 2020 GitHub."
            ),
            "license": {"name": "MIT", "url": "https://spdx.org/licenses/MIT"},
        },
        "servers": [{"url": "https://api.github.com"}],
        "paths": paths,
        "components": {kind: dict(sorted(parts.items())) for kind, parts in sorted(kept.items())},
    }


def main() -> None:
    package = Path(sys.argv[1])
    description = json.loads((package / "generated" / "api.github.com.json").read_text(encoding="utf-8"))
    result = json.dumps(subset(description), indent=1, ensure_ascii=False) + "\n"
    Path(__file__).with_name("github.json").write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
