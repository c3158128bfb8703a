"""Make a large Kineto trace by repeating a real one, and write what any reader of it has to find."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO, Literal

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}  # the last two: schema of before 2022
GAP_US = 1000  # idle time between two copies
LAST_KEYS = ("traceName", "displayTimeUnit", "baseTimeNanoseconds")  # behind the events in the grouped layout

# How libkineto's output_json.cpp lays an event out: the keys of each line, by `ph`. "lines" is what torch 2.13 writes,
# "grouped" what traces recorded from 2022 to early 2026 look like.
Layout = Literal["grouped", "lines"]
GROUPED: dict[str, tuple[tuple[str, ...], ...]] = {
    "X": (("ph", "cat", "name", "pid", "tid"), ("ts", "dur")),
    "i": (("ph", "cat", "s", "name"), ("pid", "tid"), ("ts",)),
    "M": (("name", "ph", "ts", "pid", "tid"),),
    "C": (("ph", "cat", "name"), ("pid", "tid", "ts")),
    "s": (("ph", "id", "pid", "tid", "ts"), ("cat", "name")),
    "f": (("ph", "id", "pid", "tid", "ts"), ("cat", "name", "bp")),
}
LINES: tuple[tuple[str, ...], ...] = tuple(
    (key,) for key in ("ph", "id", "cat", "s", "name", "pid", "tid", "ts", "dur", "bp")
)

# What differs from copy to copy. A quote inside a JSON string is written \" or ', so none of these can match inside
# one. An id of 0 means none and stays. Fractions of `ts` stay: copies lie whole microseconds apart.
SLOT = re.compile(
    r'"ts": (?P<ts>\d+)'
    r'|"name": "ProfilerStep#(?P<step>\d+)"'
    r'|"[Ee]xternal id": (?P<external>[1-9]\d*)'
    r'|"(?:correlation|wait_on_cuda_event_record_corr_id)": (?P<correlation>[1-9]\d*)'
    r'|"ph": "[stf]",\s*"id": (?P<flow>[1-9]\d*)'
    r'|"Python (?:parent )?id": (?P<python>[1-9]\d*)'
    r'|"Ev Idx": (?P<index>\d+)'
    r'|"Record function id": (?P<record>[1-9]\d*)'
    r'|"Sequence number": (?P<sequence>\d+)'
)
SHARED = {"flow": "correlation"}  # a launch's flow arrow bears its correlation id


class Number(str):
    """A JSON number with a fraction, kept as it was written."""


@dataclass(frozen=True)
class Seed:
    """A trace cut for repetition: text before the events, events to repeat, events written once, text behind."""

    head: str
    opening: tuple[str, ...]
    repeated: tuple[str, ...]
    closing: tuple[str, ...]
    tail: str
    truth: dict[str, float]  # of one copy, and of what is written once
    extent_us: int  # from the first start to the last end of what is repeated, rounded up


def read_seed(source: Path, layout: Layout) -> Seed:
    """Cut the Kineto trace `source` (.json or .json.gz, object or array form).

    The text of a file that libkineto wrote is kept. Any other (one that a tool rewrote) is laid out as libkineto does.
    Raises ValueError for a file without events.
    """
    raw = source.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", "surrogateescape")
    document = json.loads(text, parse_float=Number)
    if isinstance(document, list):
        document = {"traceEvents": document}
    events = document.get("traceEvents") or []
    once = [_once(event) for event in events]
    if all(once):
        raise ValueError(f"no events to repeat in {source}")
    kept = _own_text(text, events)
    head, tail = kept[0] if kept else _frame(document)
    texts = kept[1] if kept else [render(event, layout) for event in events]
    first = once.index(False)
    repeated = [event for event, single in zip(events, once, strict=True) if not single]
    timed = [event for event in repeated if "ts" in event]
    start_ns = min(_ns(event["ts"]) for event in timed)
    end_ns = max(_ns(event["ts"]) + _ns(event.get("dur", 0)) for event in timed)
    return Seed(
        head=_with_rank(head, document),
        opening=tuple(texts[:first]),
        repeated=tuple(text for text, single in zip(texts, once, strict=True) if not single),
        closing=tuple(text for text, single in zip(texts[first:], once[first:], strict=True) if single),
        tail=tail,
        truth=facts(repeated) | {"once": len(events) - len(repeated)},
        extent_us=-(-(end_ns - start_ns) // 1000),
    )


def _once(event: dict[str, object]) -> bool:
    """Whether a file holds one such event however many steps it spans: names of processes, the window's marks."""
    marks = ("Iteration Start", "Record Window End")
    return event.get("ph") == "M" or event.get("cat") == "Trace" or str(event.get("name", "")).startswith(marks)


def _own_text(text: str, events: Sequence[object]) -> tuple[tuple[str, str], list[str]] | None:
    """(text before and behind the events, text of each event) of a file that libkineto wrote, else None."""
    opening = re.search(r'"traceEvents": \[\s*\n  \{', text)
    end = max(text.rfind("\n  }\n  ]"), text.rfind("\n  }\n]"))
    if opening is None or end < opening.end():
        return None
    pieces = ["{" + piece + "\n  }" for piece in text[opening.end() : end].split("\n  },\n  {")]
    try:
        same = [json.loads(piece, parse_float=Number) for piece in pieces] == events
    except json.JSONDecodeError:
        return None
    return ((text[: opening.end() - 1], text[end + len("\n  }") :]), pieces) if same else None


def _frame(document: dict[str, object]) -> tuple[str, str]:
    """The text before and behind the events of a document that libkineto did not write, in its layout."""
    fields = {key: value for key, value in document.items() if key != "traceEvents"}
    before = "".join(f'\n  "{key}": {_value(value)},' for key, value in fields.items() if key not in LAST_KEYS)
    behind = "".join(f',\n  "{key}": {_value(fields[key])}' for key in LAST_KEYS if key in fields)
    return f'{{{before}\n  "traceEvents": [\n  ', f"\n  ]{behind}\n}}\n"


def _with_rank(head: str, document: dict[str, object]) -> str:
    """`head` with a `distributedInfo`, which some readers insist on, when the document has none."""
    if "distributedInfo" in document:
        return head
    place = head.rindex('"traceEvents"')
    return f'{head[:place]}"distributedInfo": {{"rank": 0, "world_size": 1}},\n  {head[place:]}'


def render(event: dict[str, object], layout: Layout) -> str:
    """One event as libkineto writes it."""
    lines = LINES if layout == "lines" else GROUPED.get(str(event["ph"]), (("ph",),))
    placed = {key for line in lines for key in line} | {"args"}
    lines = (*lines, tuple(key for key in event if key not in placed))
    written = [", ".join(f'"{key}": {_field(key, event[key])}' for key in line if key in event) for line in lines]
    body = ",\n    ".join(filter(None, written))
    args = event.get("args")
    if not isinstance(args, dict):
        return f"{{\n    {body}\n  }}"
    fields = ", ".join(f"{json.dumps(key)}: {_value(value)}" for key, value in args.items())
    gap = "\n    ," if layout == "lines" else ","
    return f'{{\n    {body}{gap}\n    "args": {{\n      {fields}\n    }}\n  }}'


def _field(key: str, value: object) -> str:
    return f"{Decimal(value):.3f}" if key in ("ts", "dur") and isinstance(value, Number) else _value(value)


def _value(value: object) -> str:
    """`value` as JSON on one line, numbers with a fraction as they were."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_value(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def _ns(microseconds: object) -> int:
    """Nanoseconds of a recorded time in microseconds, exact. Raises ValueError for a finer one."""
    exact = Decimal(str(microseconds)) * 1000
    if exact != int(exact):
        raise ValueError(f"a time of {microseconds} us is finer than a nanosecond")
    return int(exact)


def facts(events: Sequence[dict[str, object]]) -> dict[str, float]:
    """Counts, and times in ns, of the repeated events; device activity is kernels, copies and fills.

    `busy_ns` is the length of the union of all device activity, over all devices and streams together.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    device = [event for event in complete if str(event.get("cat", "")).lower() in GPU_CATEGORIES]
    spans = sorted((_ns(event["ts"]), _ns(event["ts"]) + _ns(event.get("dur", 0))) for event in device)
    busy, reach = 0, 0
    for start, end in spans:
        busy += max(0, end - max(start, reach))
        reach = max(reach, end)
    kernels = [event for event in device if str(event["cat"]).lower() == "kernel"]
    names = {str(event["name"]) for event in complete if str(event.get("name", "")).startswith("ProfilerStep#")}
    return {
        "events": len(events),
        "device_events": len(device),
        "kernels": len(kernels),
        "kernel_ns": sum(_ns(event.get("dur", 0)) for event in kernels),
        "busy_ns": busy,
        "device_span_ns": reach - spans[0][0] if spans else 0,
        "steps": len(names),
    }


class Template:
    """The text of some events with a slot wherever copies differ."""

    def __init__(self, texts: Sequence[str]) -> None:
        joined = ",\n  ".join(texts)
        self._pieces: list[str] = []
        self._slots: dict[str, tuple[list[int], list[int]]] = {}  # kind -> places in `_pieces`, values in the seed
        position = 0
        for match in SLOT.finditer(joined):
            group = str(match.lastgroup)
            places, values = self._slots.setdefault(SHARED.get(group, group), ([], []))
            self._pieces += (joined[position : match.start(group)], "")
            places.append(len(self._pieces) - 1)
            values.append(int(match[group]))
            position = match.end(group)
        self._pieces.append(joined[position:])

    def strides(self, extent_us: int) -> dict[str, int]:
        """By how much each kind of value grows from one copy to the next so that no two copies share one."""
        strides = {kind: max(values) + 1 for kind, (_, values) in self._slots.items()}
        if "step" in strides:
            strides["step"] -= min(self._slots["step"][1])
        return strides | {"ts": extent_us + GAP_US}

    def copy(self, number: int, strides: dict[str, int]) -> str:
        """The text of copy `number`; copy 0 is the seed's own."""
        for kind, (places, values) in self._slots.items():
            shift = number * strides[kind]
            for place, value in zip(places, values, strict=True):
                self._pieces[place] = str(value + shift)
        return "".join(self._pieces)


def closing_marks(texts: Sequence[str], shift_us: int) -> list[str]:
    """The marks behind the events, with the profiler's own span and the window's end moved behind the last copy."""
    moved = []
    for text in texts:
        if '"cat": "Trace"' in text:
            text = re.sub(r'("dur": )(\d+)', lambda match: f"{match[1]}{int(match[2]) + shift_us}", text)
        elif '"Record Window End"' in text:
            text = re.sub(r'("ts": )(\d+)', lambda match: f"{match[1]}{int(match[2]) + shift_us}", text)
        moved.append(text)
    return moved


@contextmanager
def _output(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """`path` opened for bytes; with a name on .gz they are compressed at level 6, without name and time of writing."""
    with path.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield packed


def make(source: Path, out: Path, size: int, layout: Layout) -> dict[str, object]:
    """Write `out`: as many whole copies of `source` as come nearest to `size` bytes before compression, at least one.

    One copy is in memory at a time. Returns the facts that are also written to `out` + ".truth.json": counts, and times
    in us, computed from the seed in whole nanoseconds and multiplied; `sha256` and `bytes` are of the text.
    """
    seed = read_seed(source, layout)
    template = Template(seed.repeated)
    strides = template.strides(seed.extent_us)
    copies = max(1, round((size - len(seed.head)) / (len(template.copy(0, strides)) + 4)))
    shift_us = (copies - 1) * strides["ts"]
    digest, written = hashlib.sha256(), 0
    with _output(out) as file:
        for text in _parts(seed, template, strides, copies):
            data = text.encode("utf-8", "surrogateescape")
            digest.update(data)
            written += file.write(data)
    one = seed.truth
    truth: dict[str, object] = {
        "seed": source.name,
        "seed_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "copies": copies,
        "bytes": written,
        "sha256": digest.hexdigest(),
        "events": int(one["events"]) * copies + int(one["once"]),
        "device_events": int(one["device_events"]) * copies,
        "kernels": int(one["kernels"]) * copies,
        "kernel_us": one["kernel_ns"] * copies / 1000,
        "busy_us": one["busy_ns"] * copies / 1000,
        "span_us": (one["device_span_ns"] + shift_us * 1000) / 1000,
        "steps": int(one["steps"]) * copies,
    }
    Path(f"{out}.truth.json").write_text(json.dumps(truth, indent=2) + "\n")
    return truth


def _parts(seed: Seed, template: Template, strides: dict[str, int], copies: int) -> Iterator[str]:
    yield seed.head
    for text in seed.opening:
        yield text + ",\n  "
    for number in range(copies):
        yield template.copy(number, strides)
        if number + 1 < copies:
            yield ",\n  "
    for text in closing_marks(seed.closing, (copies - 1) * strides["ts"]):
        yield ",\n  " + text
    yield seed.tail


def main() -> None:
    """Read the command line, write the trace, print its facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a real Kineto trace, .json or .json.gz")
    parser.add_argument("out", type=Path, help="the file to write; .gz compresses")
    parser.add_argument("--bytes", type=float, required=True, help="size before compression, such as 200e6")
    layouts = "how a source that a tool rewrote is laid out: keys in groups, or one on a line as torch 2.13 does"
    parser.add_argument("--layout", choices=("grouped", "lines"), default="grouped", help=layouts)
    options = parser.parse_args()
    print(json.dumps(make(options.source, options.out, int(options.bytes), options.layout), indent=2))


if __name__ == "__main__":
    main()
