"""Scripts recorded on a CPU, and the same recording as if a GPU had spent given times in its products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from advisor import match, registry
from advisor import patch as patching
from advisor.capture.launch import Child
from advisor.correlate import correlate
from advisor.errors import SourceError
from advisor.hardware import lookup
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import read_trace
from advisor.ingest.probe import read_probe
from advisor.model import Decline, Environment, Finding, Hardware, Kernels, Operators, Profile, Rewrite, Utilisation
from advisor.rule import Context
from advisor.session import Spec
from advisor.source import Source

RULES = {name: item.rule for name, item in registry.load()[0].items()}
Product = tuple[str, str, float]  # operator, dtype of its inputs, time of its kernel in microseconds
LARGE: Sequence[Product] = (("aten::addmm", "float32", 400.0),) * 20
STEP_US = 10_000.0


@dataclass
class Recorded:
    """What a rule says of a recorded script."""

    ctx: Context
    script: str = "train.py"

    def ask(self, rule: str) -> list[Finding | Decline | Rewrite]:
        """What a rule answers, a finding as what becomes of it."""
        found = list(RULES[rule].match(self.ctx))
        return [RULES[rule].rewrite(i, self.ctx.read(i.span.path)) if isinstance(i, Finding) else i for i in found]

    def reason(self, rule: str) -> str:
        """The one reason for which a rule leaves the script alone."""
        (answer,) = self.ask(rule)
        assert isinstance(answer, Decline), answer
        return answer.reason

    def patched(self, rule: str) -> str:
        """The script with the one rewrite of a rule."""
        (answer,) = self.ask(rule)
        assert isinstance(answer, Rewrite), answer
        return patching.build([answer], self.ctx.read).sources[answer.finding.span.path]


def briefly(folder: Path) -> Path:
    """Run train.py of a folder through a brief capture; where its records lie."""
    out = folder / "out"
    spec = Spec(
        script=str(folder / "train.py"),
        argv=(),
        root=str(folder),
        out=str(out),
        plan="advisor.capture.probe:CapturePlan",
        options={"brief": True, "device_rates": False, "environment": {"OMP_NUM_THREADS": "1"}},
    )
    with Child(spec, cwd=str(folder)) as child:
        while child.receive() is not None:
            continue
        child.wait()
        assert child.status().get("status") in ("stopped", "ended"), child.output_tail()
    return out


def record(text: str, folder: Path, **others: str) -> Recorded:
    """Run a script through a brief capture; `others` are files beside it by their stem."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    for stem, other in others.items():
        (folder / f"{stem}.py").write_text(other, encoding="utf-8")
    out = briefly(folder)
    graphs, _ = read_graphs(out / "graph.json", folder)
    probe = read_probe(out / "probe.json", folder)
    profile = Profile(
        environment=Environment(python="3", torch="2", cpu_count=2),
        hardware=Hardware(name="CPU", kind="cpu"),
        steps=(),
        step_us=probe.step_us,
        graphs=graphs,
        optimizers=probe.optimizers,
        calls=probe.calls,
        facts=dict(probe.flags),
        costs=correlate(read_trace(out / "trace.json.gz"), read_trace(out / "annotated.json.gz"), graphs).costs,
    )
    ctx = match.context(profile, lambda path: Source.read(folder, path), worth=None, script="train.py")
    return Recorded(ctx)


def on_a_gpu(recorded: Recorded, products: Sequence[Product] = LARGE, name: str = "NVIDIA H100 80GB HBM3") -> Recorded:
    """The same recording with a step of 10 ms on a GPU, which spends its time in some products."""
    hardware = lookup(name)
    assert hardware is not None
    return Recorded(replace(recorded.ctx, profile=gpu_profile(recorded.ctx.profile, hardware, products)))


def reading(recorded: Recorded, text: str, **others: str) -> Recorded:
    """A recording with another text of its script, which differs behind what was recorded, and files beside it."""
    files = {"train.py": text, **{f"{stem}.py": other for stem, other in others.items()}}

    def read(path: str) -> Source:
        if path not in files:
            raise SourceError(f"no such file: {path}")
        return Source(path, files[path])

    return Recorded(replace(recorded.ctx, read=read, files_in=lambda folder: tuple(files)))


def gpu_profile(profile: Profile, hardware: Hardware, products: Sequence[Product], **facts: Any) -> Profile:
    """A profile on a GPU whose one profiled step has these products."""
    count = len(products)
    rows = range(count)
    operators = Operators(
        name=tuple(p[0] for p in products),
        start_us=tuple(float(i) for i in rows),
        duration_us=(1.0,) * count,
        thread=(1,) * count,
        sequence=(-1,) * count,
        forward_thread=(0,) * count,
        parent=(-1,) * count,
        step=(0,) * count,
        shapes=((),) * count,
        dtypes=tuple((p[1], p[1]) for p in products),
    )
    kernels = Kernels(
        name=("gemm",) * count,
        category=("kernel",) * count,
        start_us=tuple(sum(p[2] for p in products[:i]) for i in rows),
        duration_us=tuple(p[2] for p in products),
        stream=(7,) * count,
        correlation=tuple(rows),
        operator=tuple(rows),
        step=(0,) * count,
    )
    return replace(
        profile,
        hardware=hardware,
        operators=operators,
        kernels=kernels,
        step_us=(STEP_US,),
        utilisation=Utilisation(busy=0.95),
        facts={**profile.facts, **facts},
    )
