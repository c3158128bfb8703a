"""Describes the regions that rewrites replace, has them proved alone in a child process, and reads the answer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from advisor.model import Arg, Difference, Graph, Node, Place, Ref, RegionProof, Replacement, Rewrite, Symbol
from advisor.patterns.masks import reads_batch
from advisor.patterns.regions import inner_nodes
from advisor.semantics import operation
from advisor.verify.numerics import FLOOR_CAP, RATIO

Job: TypeAlias = dict[str, Any]
Run: TypeAlias = Callable[[Sequence[Job]], Sequence[Mapping[str, Any]]]

START_S = 120.0  # for torch to load and for the first region
EACH_S = 120.0  # for every further one; a region takes seconds, one of millions of literal elements a minute
PRODUCTS = frozenset({"linear", "matmul", "addmm", "conv1d", "conv2d", "conv3d"})  # round to autocast's dtype
MASK_FACTS = ("keep", "drop", "nonzero", "zero", "fill")  # of `advisor.capture.annotate.mask_facts`
WORST = 8


class CannotDescribe(Exception):
    """Why a region cannot be run alone."""


def prove(rewrites: Iterable[Rewrite], graphs: Iterable[Graph], run: Run) -> dict[str, RegionProof]:
    """The proof of every rewrite that has a replacement, by the rewrite's id.

    `run` proves distinct jobs and gives one record per job (`advisor.verify.proving.prove`); what it leaves out, or
    what cannot be described, is rejected.
    """
    known = {graph.index: graph for graph in graphs}
    wanted: dict[str, list[str]] = {}  # id of a rewrite -> its jobs as text
    failed: dict[str, str] = {}
    for rewrite in rewrites:
        if rewrite.finding.replacement is None:
            continue
        try:
            found = [json.dumps(job, sort_keys=True) for job in jobs_of(rewrite, known)]
        except CannotDescribe as error:
            failed[rewrite.id] = str(error)
        else:
            wanted[rewrite.id] = list(dict.fromkeys(found))
    distinct = list(dict.fromkeys(text for texts in wanted.values() for text in texts))
    results = list(run([json.loads(text) for text in distinct])) if distinct else []
    answers = dict(zip(distinct, results, strict=False))
    proofs = {name: _together([answers.get(text, {}) for text in texts]) for name, texts in wanted.items()}
    return proofs | {name: _rejected(reason) for name, reason in failed.items()}


def _rejected(reason: str) -> RegionProof:
    return RegionProof(ok=False, regions=0, compared=0, reasons=(reason,))


def _together(answers: Sequence[Mapping[str, Any]]) -> RegionProof:
    """All regions of a rewrite: it is proved where each of them is."""
    reasons: list[str] = []
    skipped: dict[str, int] = {}
    worst: list[Difference] = []
    for answer in answers:
        if answer.get("ok") is not True or not answer.get("compared"):
            reasons += answer.get("reasons") or ["the region was not compared: no answer came"]
        for reason, count in (answer.get("skipped") or {}).items():
            skipped[reason] = skipped.get(reason, 0) + int(count)
        worst += [_difference(item) for item in answer.get("worst") or ()]
    worst.sort(key=lambda d: -(d.error / d.limit if d.limit else d.error))
    return RegionProof(
        ok=bool(answers) and not reasons,
        regions=len(answers),
        compared=sum(int(answer.get("compared") or 0) for answer in answers),
        dtypes=tuple(dict.fromkeys(name for answer in answers for name in answer.get("dtypes") or ())),
        skipped=skipped,
        worst=tuple(worst[:WORST]),
        reasons=tuple(dict.fromkeys(reasons)),
        notes=tuple(dict.fromkeys(note for answer in answers for note in answer.get("notes") or ())),
    )


def _difference(item: Mapping[str, Any]) -> Difference:
    error = math.inf if item["error"] is None else float(item["error"])
    base, limit = float(item["base_error"]), float(item["limit"])
    return Difference(name=str(item["name"]), base_error=base, error=error, limit=limit, ok=bool(item["ok"]))


# ---------------------------------------------------------------------------------------------------------------- jobs


def jobs_of(rewrite: Rewrite, graphs: Mapping[int, Graph]) -> list[Job]:
    """One job per place of the rewrite's replacement; equal regions give equal jobs.

    Raises CannotDescribe for a region that is not closed, or of which something was not recorded.
    """
    replacement = rewrite.finding.replacement
    assert replacement is not None
    if not replacement.places:
        raise CannotDescribe("the replacement names no region")
    return [_job(rewrite, replacement, place, graphs) for place in replacement.places]


def _job(rewrite: Rewrite, replacement: Replacement, place: Place, graphs: Mapping[int, Graph]) -> Job:
    graph = graphs.get(place.graph)
    if graph is None:
        raise CannotDescribe(f"graph {place.graph} is not there")
    inner = sorted(inner_nodes(graph, place.root, frozenset(place.inputs.values())))
    order = {index: number for number, index in enumerate([*sorted(set(place.inputs.values())), *inner])}
    root = graph.nodes[place.root]
    readers = [graph.nodes[user] for user in root.users]
    if place.root in place.inputs.values() or root.shape is None:
        raise CannotDescribe(f"`{root.name}` is not a tensor that the region computes")
    dropout, constants = frozenset(place.dropout), {**replacement.constants, **place.constants}
    return {
        "template": replacement.template,
        "constants": {name: _plain(value, {}) for name, value in sorted(constants.items())},
        "imports": list(replacement.imports),
        "tolerance": rewrite.tolerance,
        "ratio": RATIO,
        "floor": FLOOR_CAP,
        "device": root.device,
        "root": order[place.root],
        "inputs": {name: _input(graph, index, order) for name, index in sorted(place.inputs.items())},
        "nodes": [_node(graph.nodes[index], order, index in dropout) for index in inner],
        "rounded": bool(readers) and all(operation(reader) in PRODUCTS for reader in readers),
        "viewed": any(operation(reader) == "view" for reader in readers),
    }


def _input(graph: Graph, index: int, order: Mapping[int, int]) -> Job:
    node = graph.nodes[index]
    if node.shape is None or node.dtype is None:
        raise CannotDescribe(f"the input `{node.name}` is not a tensor of the graph")
    facts = {name: text for name, text in sorted(node.facts.items()) if name.partition("_")[0] in MASK_FACTS}
    return {
        "node": order[index],
        "shape": node.shape,
        "dtype": node.dtype,
        "stride": node.stride,
        "requires_grad": node.requires_grad,
        "facts": facts,
        "mask": bool(facts),
        "from_batch": reads_batch(graph, index),
    }


def _node(node: Node, order: Mapping[int, int], dropout: bool) -> Job:
    if not node.op.startswith("call_"):
        raise CannotDescribe(f"the region reads `{node.name}`, which is none of its inputs")
    return {
        "id": order[node.index],
        "name": operation(node),
        "op": node.op,
        "target": node.target,
        "args": [_plain(arg, order) for arg in node.args],
        "kwargs": {name: _plain(arg, order) for name, arg in node.kwargs.items()},
        "shape": node.shape,
        "dtype": node.dtype,
        "dropout": dropout,
    }


def _plain(arg: Arg, order: Mapping[int, int]) -> Any:
    """An argument as JSON: a constant, or an object with a single key that names its kind."""
    if isinstance(arg, Ref):
        return {"ref": order[arg.index]}
    if isinstance(arg, (tuple, list)):
        return {"tuple": [_plain(item, order) for item in arg]}
    if isinstance(arg, Symbol):
        return {arg.kind: [_plain(part, order) for part in arg.parts] if arg.kind == "slice" else arg.text}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": repr(arg)}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    return {"opaque": type(arg).__name__}


# --------------------------------------------------------------------------------------------------------------- child


def run_child(
    jobs: Sequence[Job], work: Path, *, interpreter: str = sys.executable, environment: Mapping[str, str] | None = None
) -> list[Mapping[str, Any]]:
    """Prove jobs in a child process, one record per job; a job with which the process ends is rejected, the rest go on.

    `work` is an existing folder of the caller's, which the child runs in.
    """
    found: list[Mapping[str, Any]] = []
    while len(found) < len(jobs):
        told, problem = _once(jobs[len(found) :], work, interpreter, environment)
        found += told
        if len(found) < len(jobs):
            found.append({"ok": False, "reasons": [f"the region was not compared: {problem}"]})
    return found


def _once(
    jobs: Sequence[Job], work: Path, interpreter: str, environment: Mapping[str, str] | None
) -> tuple[list[Mapping[str, Any]], str]:
    asked, result = work / "regions.json", work / "proofs.json"
    asked.write_text(json.dumps(jobs), encoding="utf-8")
    result.unlink(missing_ok=True)
    command = [interpreter, "-m", "advisor.verify.proving", str(asked.resolve()), str(result.resolve())]
    limit = START_S + EACH_S * len(jobs)
    problem = "the process ended before it"
    try:
        done = subprocess.run(
            command, env=environment, cwd=work, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {limit:g} s"
    except OSError as error:
        lost: list[Mapping[str, Any]] = [{"reasons": [f"the region was not compared: {error.strerror}"]} for _ in jobs]
        return lost, ""
    else:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if done.returncode < 0:
            problem = f"the process was ended by signal {-done.returncode}"
        elif done.returncode:
            problem = f"the process ended with exit status {done.returncode}" + (f": {last}" if last else "")
    return _records(result, len(jobs)), problem


def _records(result: Path, most: int) -> list[Mapping[str, Any]]:
    """What the child wrote, one record per job it came to; nothing where it ended while it wrote."""
    try:
        found: list[Mapping[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return found[:most]
