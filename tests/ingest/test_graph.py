"""Captured graphs as nodes, and the spans of their frames."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from advisor.errors import ArtifactError
from advisor.ingest.graph import read_graphs
from advisor.model import Graph, Node, Ref, Symbol

TINY = Path(__file__).parents[1] / "data" / "tiny_gpt"


@pytest.fixture(scope="module")
def tiny() -> Graph:
    (graph,), missing = read_graphs(TINY / "graph.json", TINY)
    assert missing == {}
    return graph


def named(graph: Graph, target: str) -> list[Node]:
    return [node for node in graph.nodes if node.target == target]


def test_nodes_of_a_real_capture(tiny: Graph) -> None:
    assert tiny.training and tiny.breaks == ()
    assert [node.index for node in tiny.nodes] == list(range(len(tiny.nodes)))
    products = named(tiny, "operator.matmul")
    assert [node.shape for node in products] == [(4, 2, 16, 16), (4, 2, 16, 16)] * 2
    assert {node.module for node in products} == {"blocks.0", "blocks.1"}
    filled = named(tiny, "method.masked_fill")[0]
    assert filled.args[-1] == -math.inf
    assert isinstance(filled.args[0], Ref)


def test_users_are_the_reverse_of_inputs(tiny: Graph) -> None:
    pairs = {(read, node.index) for node in tiny.nodes for read in node.inputs()}
    assert pairs == {(node.index, user) for node in tiny.nodes for user in node.users}
    assert all(list(node.users) == sorted(set(node.users)) for node in tiny.nodes)


def test_spans_point_at_the_expression_in_the_users_file(tiny: Graph) -> None:
    lines = (TINY / "train.py").read_text(encoding="utf-8").splitlines()
    span = named(tiny, "operator.matmul")[0].span
    assert span is not None and span.path == "train.py" and span.function == "forward"
    assert lines[span.line - 1][span.column :].startswith("q @ k.transpose(-2, -1)")
    softmax = named(tiny, "torch.nn.functional.softmax")[0].span
    assert softmax is not None
    assert lines[softmax.line - 1][softmax.column : softmax.end_column].startswith("F.softmax(att.masked_fill")


def test_columns_are_left_out_where_the_file_changed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\n" * 60, encoding="utf-8")
    (graph,), _ = read_graphs(TINY / "graph.json", tmp_path)
    span = named(graph, "operator.matmul")[0].span
    assert span is not None and span.line > 1
    assert (span.column, span.end_column) == (0, None)


def write(path: Path, *nodes: dict[str, Any], **more: Any) -> Path:
    described = [
        {"name": f"n{place}", "op": "call_function", "target": "f", **node} for place, node in enumerate(nodes)
    ]
    document = {"graphs": [{"index": 0, "nodes": described}], **more}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_arguments(tmp_path: Path) -> None:
    args = [
        {"ref": 0},
        {"tuple": [{"ref": 0}, 2, [3]]},
        {"slice": [None, {"ref": 0}, 2]},
        {"float": "-inf"},
        {"dtype": "bfloat16"},
        {"ellipsis": ""},
        {"opaque": "a.B"},
        True,
        None,
        "x",
    ]
    (graph,), _ = read_graphs(
        write(tmp_path / "g.json", {}, {"args": args, "kwargs": {"dim": {"float": "nan"}}}), tmp_path
    )
    node = graph.nodes[1]
    assert node.args == (
        Ref(0),
        (Ref(0), 2, (3,)),
        Symbol("slice", parts=(None, Ref(0), 2)),
        -math.inf,
        Symbol("dtype", "bfloat16"),
        Symbol("ellipsis"),
        Symbol("opaque", "a.B"),
        True,
        None,
        "x",
    )
    assert math.isnan(node.kwargs["dim"])
    assert graph.nodes[0].users == (1,)


def test_library_frames_are_kept_but_own_no_node(tmp_path: Path) -> None:
    def frame(path: str) -> dict[str, Any]:
        return {"path": path, "line": 3, "function": "f"}

    paths = ["model.py", "site-packages/lib/layers.py", "lib/python3/functools.py", "<string>", "outside/else.py"]
    inside = str(tmp_path / "pkg" / "deep.py")
    venv = str(tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "x.py")
    own = {"frames": [frame(path) for path in (*paths, venv)]}
    deep = {"frames": [frame("model.py"), frame(inside), frame("/usr/lib/python3.12/random.py")]}
    (graph,), _ = read_graphs(write(tmp_path / "g.json", own, deep, {}), tmp_path)
    assert [span.path for span in graph.nodes[0].frames] == [*paths, venv]
    assert [str(node.span) for node in graph.nodes] == ["model.py:3", "pkg/deep.py:3", "None"]


def test_breaks_and_gaps(tmp_path: Path) -> None:
    breaks = [{"reason": "print", "count": 2}, {"reason": "item", "count": 1}]
    (graph,), missing = read_graphs(write(tmp_path / "g.json", {}, breaks=breaks, missing={"compiled": "x"}), tmp_path)
    assert [item.reason for item in graph.breaks] == ["print (2 times)", "item"]
    assert missing == {"compiled": "x"}
    empty = tmp_path / "none.json"
    empty.write_text(json.dumps({"graphs": [], "breaks": breaks}), encoding="utf-8")
    assert read_graphs(empty, tmp_path) == ((), {"graph": "no graph was captured: print (2 times); item"})


@pytest.mark.parametrize(
    ("nodes", "part"),
    [
        ([{"args": [{"ref": 7}]}], "reads node 7"),
        ([{"args": [{"tensor": 1}]}], "unknown kind 'tensor'"),
        ([{"args": [{"a": 1, "b": 2}]}], "not of a known form"),
        ([{"op": None}], "another form"),
    ],
)
def test_broken_graphs_say_what_to_do(tmp_path: Path, nodes: list[dict[str, Any]], part: str) -> None:
    with pytest.raises(ArtifactError, match=part) as error:
        read_graphs(write(tmp_path / "graph.json", *nodes), tmp_path)
    assert "record the run again" in str(error.value)


def test_a_truncated_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes((TINY / "graph.json").read_bytes()[:5000])
    with pytest.raises(ArtifactError, match="truncated"):
        read_graphs(path, tmp_path)
