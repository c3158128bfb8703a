"""Read and analyse one trace with one peer, in that peer's own interpreter, and print what it found as JSON."""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import time
from collections.abc import Callable

# What a peer found: counts and microseconds under the names of the `.truth.json` that make_trace.py writes. A value it
# does not compute is left out.
Found = dict[str, float]
HTA_BACKENDS = ("json", "ijson", "ijson_batched", "ijson_batch_and_compress")


def stdlib_json(path: str) -> Found:
    """`json.load` and the sum of kernel durations: the least that any reader in plain Python has to do."""
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        events = json.load(file)["traceEvents"]
    durations = [event["dur"] for event in events if event.get("cat") == "kernel"]
    return {"events": len(events), "kernels": len(durations), "kernel_us": sum(durations)}


def hta(path: str, backend: str) -> Found:
    """HolisticTraceAnalysis: TraceAnalysis() and the three analyses that any trace allows, without their plots.

    The last step is kept, as every other contender keeps it. HTA rounds starts up and ends down to whole microseconds.
    """
    from hta.common.trace_parser import set_default_trace_parsing_backend
    from hta.configs.parser_config import ParserBackend
    from hta.trace_analysis import TraceAnalysis

    set_default_trace_parsing_backend(ParserBackend(backend))
    analysis = TraceAnalysis(trace_files={0: os.path.abspath(path)}, include_last_profiler_step=True)
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    analysis.get_gpu_kernel_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    events = analysis.t.get_trace(0)
    kernels = events[events["cat"] == analysis.t.symbol_table.get_sym_id_map()["kernel"]]
    times = breakdown.iloc[0]
    return {
        "kernels": len(kernels),
        "kernel_us": float(kernels["dur"].sum()),
        "busy_us": float(times["kernel_time(us)"] - times["idle_time(us)"]),
    }


def tracelens(path: str) -> Found:
    """AMD's TraceLens: the tree without Python frames (its default), the device timeline and the operators' table."""
    from TraceLens import TreePerfAnalyzer

    analyzer = TreePerfAnalyzer.from_file(path, add_python_func=False)
    timeline = analyzer.get_df_gpu_timeline().set_index("type")["time ms"]
    launchers = analyzer.get_df_kernel_launchers(include_kernel_details=True)
    analyzer.get_df_kernel_launchers_summary(launchers)
    kernels = [event["dur"] for event in analyzer.tree.events if event.get("cat") == "kernel"]
    return {
        "events": len(analyzer.tree.events),
        "kernels": len(kernels),
        "kernel_us": sum(kernels),
        "busy_us": float(timeline["busy_time"]) * 1000,
    }


def peers() -> dict[str, Callable[[str], Found]]:
    """Every peer by the name that bench_traces.py gives it."""
    backends = {f"hta-{name}": lambda path, name=name: hta(path, name) for name in HTA_BACKENDS}
    return {"json": stdlib_json, "tracelens": tracelens, **backends}


def versions(packages: list[str]) -> dict[str, str | None]:
    """The version of each package in this interpreter, None where it is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def main() -> None:
    """Read the command line and print one line of JSON, the last of what the peer's packages print."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in peers():
        commands.add_parser(name).add_argument("trace")
    commands.add_parser("versions").add_argument("packages", nargs="+")
    options = parser.parse_args()
    if options.command == "versions":
        print(json.dumps(versions(options.packages)))
        return
    start = time.perf_counter()
    found = peers()[options.command](options.trace)
    print(json.dumps(found | {"inside_s": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
