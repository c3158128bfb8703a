"""Cutting the text of a trace into whole events: every layout, every place to cut, every kind of damage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from advisor.errors import ArtifactError
from advisor.ingest import events as module
from advisor.ingest.events import Events, scan, with_null


def blocks(text: bytes, size: int) -> Iterator[bytes]:
    return (text[place : place + size] for place in range(0, len(text), size))


def read(text: bytes, size: int = 1 << 20, *, exact: bool = False) -> tuple[list[Any], Events]:
    """The events of a text, one by one, and what else was found."""
    found = Events("t.json", blocks(text, size), exact=exact)
    return [event for chunk in found.chunks() for event in json.loads(b"[" + chunk + b"]")], found


EVENT = {"ph": "X", "cat": "kernel", "name": 'a {"ph": [', "ts": 1.5, "dur": 2, "args": {"x": [1, {"y": "}"}], "z": []}}
LIST = [dict(EVENT, ts=place) for place in range(5)]
LAYOUTS = {
    "compact": json.dumps(LIST, separators=(",", ":")),
    "spaced": json.dumps(LIST),
    "pretty": json.dumps(LIST, indent=2),
    "windows": json.dumps(LIST, indent=4).replace("\n", "\r\n"),
    "tabs": json.dumps(LIST, indent="\t"),
    "sorted": json.dumps(LIST, sort_keys=True),
    "ts first": json.dumps([{"ts": event["ts"], **event} for event in LIST]),
    "trailing comma": json.dumps(LIST)[:-1] + ",]",
    "many commas": json.dumps(LIST).replace("}, {", "},,, {"),
    "no comma": json.dumps(LIST).replace("}, {", "}\n{"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["array", "object", "head", "tail", "mark"])
def test_layouts(layout: str, form: str) -> None:
    array = LAYOUTS[layout]
    text = {
        "array": array,
        "object": f'{{"traceEvents":{array}}}',
        "head": f' {{"schemaVersion": 1, "args": {{"a": [{{}}]}}, "traceEvents" :\n {array} }}\n',
        "tail": f'{{"traceEvents": {array}, "schemaVersion": 1, "other": [{{"ph": "X"}}]}}',
        "mark": "\ufeff" + array,
    }[form].encode()
    for size in (1, 2, 3, 17, 64, 100, 250, 1 << 20):
        for exact in (False, True)[layout == "many commas" :]:
            found, events = read(text, size, exact=exact)
            assert found == LIST
            assert (events.lost, events.skipped) == ([], 0)
            assert events.head == ({"schemaVersion": 1} if form in ("head", "tail") else {})


@pytest.mark.parametrize("text", [b"[]", b"[ ]", b"[,]", b'{"traceEvents":[]}', b' {"traceEvents" : [ ] , "a":1}'])
def test_no_events(text: bytes) -> None:
    assert read(text)[0] == []
    assert read(text)[1].lost == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "t.json is empty: record the run again"),
        (b" \n\t ", "t.json is empty: record the run again"),
        (b"\0\0\0", "t.json is no JSON: give a trace that torch.profiler exported"),
        (b"Name,Time\n", "t.json is no JSON"),
        (b"\x89PNG\r\n", "t.json is no JSON"),
        (b"12", "t.json is no JSON"),
        (b'"traceEvents":[{}]', "t.json is no JSON"),
        (b"{", "t.json has no list of traceEvents"),
        (b"{}", "t.json has no list of traceEvents"),
        (b'{"traceEvents":{}}', "t.json has no list of traceEvents"),
        (b'{"traceEvents":null}', "t.json has no list of traceEvents"),
        (b'{"traceEvents"', "t.json has no list of traceEvents"),
        (b'{"x":"\\"traceEvents\\": ["}', "t.json has no list of traceEvents"),
        (b'{"rocprofiler-sdk-tool":[{}]}', "t.json is an export of rocprofv3, not of torch.profiler: record with"),
    ],
)
def test_refused(text: bytes, says: str) -> None:
    for size in (1, 1 << 20):
        with pytest.raises(ArtifactError) as caught:
            read(text, size)
        assert str(caught.value).startswith(says)


@pytest.mark.parametrize("text", [b"[1, 2, 3]", b'["a", "b"]', b"[[1], [2]]", b"[null]", b"[NaN]"])
def test_a_list_of_something_else(text: bytes) -> None:
    found, events = read(text)
    assert found == [] and events.skipped == 1
    assert events.lost == ["truncated: the text ends inside the list of events"]


# -- objects in arguments that look like events


NESTED = [
    {"ph": "X", "ts": 1, "args": {"a": [{"ph": 1}, {"ph": 2}, {"ph": 3}]}},
    {"ph": "X", "ts": 2, "args": {"a": [1, {"ph": "X", "name": "no event", "ts": 1}], "b": {"ph": {"ph": 1}}}},
    {"ph": "X", "ts": 3, "args": {"a": ["ph", '"ph"', '{"ph"', ',{"ph"', "}]"]}},
    {"name": "first", "ph": "M", "args": {"name": "python"}},
] * 3


@pytest.mark.parametrize("indent", [None, 1])
def test_objects_in_arguments(indent: int | None) -> None:
    text = json.dumps({"traceEvents": NESTED}, indent=indent).encode()
    for size in range(1, 300, 7):
        assert read(text, size, exact=True)[0] == NESTED
        assert read(text, size, exact=True)[1].lost == []


def test_a_second_list() -> None:
    """The first counts, and it is said that there is another."""
    text = json.dumps({"traceEvents": LIST, "x": 1})[:-1] + ', "traceEvents": [{"ph": "M"}, {"ph": "M"}]}'
    found, events = read(text.encode(), exact=True)
    assert found == LIST
    assert events.lost == ["a second list of traceEvents was not read"]


# -- truncation


@pytest.mark.parametrize("layout", ["compact", "pretty", "sorted"])
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_cut_at_every_byte(layout: str, size: int) -> None:
    whole = '{"schemaVersion":1,"traceEvents":' + LAYOUTS[layout] + ',"a":{"b":1}}'
    ends = [whole.index("[") + 1]
    for _ in LIST:
        begin = re.compile(r"[\s,]*").match(whole, ends[-1]).end()  # type: ignore[union-attr]
        ends.append(json.JSONDecoder().raw_decode(whole, begin)[1])
    del ends[0]
    start, behind = whole.index("["), whole.rindex("]") + 1
    for length in range(1, len(whole)):
        text = whole[:length].encode()
        if length <= start:
            with pytest.raises(ArtifactError):
                read(text, size)
            continue
        found, events = read(text, size)
        assert found == LIST[: sum(end <= length for end in ends)], length
        if length < behind:
            assert events.lost == ["truncated: the text ends inside the list of events"]
        elif length == behind:
            assert events.lost == ["truncated: the text ends right after the events"]
        else:
            assert events.lost == ["what stands after the events cannot be read"]
        assert events.skipped == int(length < behind and length not in _between(whole, ends, start))


def _between(text: str, ends: list[int], start: int) -> set[int]:
    """Lengths at which a text is cut between events."""
    found = set()
    for place in (start + 1, *ends):
        found.add(place)
        while place < len(text) and text[place] in ", \n":
            place += 1
            found.add(place)
    return found


def test_array_form_without_its_end() -> None:
    found, events = read(b'[{"ph":"X"},{"ph":"M"}')
    assert found == [{"ph": "X"}, {"ph": "M"}]
    assert events.lost == ["truncated: the text ends inside the list of events"]


def test_something_behind_the_array() -> None:
    found, events = read(b'[{"ph":"X"}] {"ph":"M"}')
    assert found == [{"ph": "X"}] and events.lost == ["what stands after the events cannot be read"]


# -- damage


GOOD = '{"ph":"X","name":"good","ts":%d,"args":{"name":"x","list":[{"name":1}]}}'
DAMAGED = {
    "no quote": '{"ph":"X","name":"bad,"ts":3}',
    "quote in a name": '{"ph":"X","name":"a "quoted" name","ts":3}',
    "escape": r'{"ph":"X","name":"C:\Users\u","ts":3}',
    "no value": '{"ph":"X","name":"bad","ts":,"args":{"name":"python"}}',
    "no brace": '{"ph":"X","name":"bad","ts":3',
    "no brace of arguments": '{"ph":"X","name":"bad","args":{"name":"y","ts":3}',
    "two commas": '{"ph":"X",,"ts":3}',
    "comma at the end": '{"ph":"X","ts":3,}',
    "single quotes": "{'ph':'X'}",
    "word": "nonsense",
    "number": "17",
    "list": "[[1], 2]",
    "no bracket": '{"ph":"X","ts":3,"args":{"x":[1,2}}',
    "zeros": '{"ph":"X","name":"bad' + "\0" * 4096 + '":1,"dur":2}',
    "brackets": '{"ph":"X","args":' + "[" * 100_000,
    "closed brackets": '{"ph":"X","args":' + "[" * 100_000 + "]" * 100_000 + "}",
    "objects": '{"args":' * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_damage_is_skipped(damage: str, size: int) -> None:
    """The events before and behind a damaged one are found, whatever is wrong with it."""
    parts = [GOOD % place for place in range(40)]
    parts[20:20] = [DAMAGED[damage]]
    found, events = read(f'{{"traceEvents":[{",".join(parts)}]}}'.encode(), size, exact=True)
    assert [event["ts"] for event in found if event.get("name") == "good"] == list(range(40))
    assert len(found) == 40
    assert events.skipped >= 1 and events.lost == []


def test_damage_everywhere() -> None:
    """Every second event is damaged: the others are found."""
    parts = [GOOD % place if place % 2 else DAMAGED["no value"] for place in range(4000)]
    found, events = read(f"[{','.join(parts)}]".encode(), exact=True)
    assert len(found) == 2000 and events.skipped == 2000


def test_damage_does_not_depend_on_the_blocks() -> None:
    parts = [
        GOOD % 1,
        DAMAGED["no value"],
        GOOD % 2,
        DAMAGED["quote in a name"],
        GOOD % 3,
        DAMAGED["two commas"],
        GOOD % 4,
    ]
    text = f'{{"traceEvents":[{",".join(parts)}]}}'.encode()
    expected = read(text)
    for size in range(1, len(text), 3):
        found, events = read(text, size, exact=True)
        assert (found, events.skipped, events.lost) == (expected[0], expected[1].skipped, expected[1].lost)


@pytest.mark.parametrize("damage", ['{"ph":"X","ts":3,"args":{"x":[1,2', '{"ph":"X","args":{"x":['])
def test_an_event_that_is_not_closed(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it could be its own: they are taken for events where they have the name and phase of one."""
    parts = [GOOD % place for place in range(400)]
    parts[20:20] = [damage]
    text = f'{{"traceEvents":[{",".join(parts)}]}}'.encode()
    for limit, size in ((4 << 20, 1 << 20), (4 << 20, 1000), (4000, 1000)):
        monkeypatch.setattr(module, "EVENT_LIMIT_BYTES", limit)
        found, events = read(text, size, exact=True)
        assert [event["ts"] for event in found if event.get("name") == "good"] == list(range(400))
        assert len(found) == 400 and events.skipped == 1


# -- limits


def test_an_event_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENT_LIMIT_BYTES", 10_000)
    for start in (b'{"ph":"X","name":"', b'{"name":"', b'{"ph":"X","args":"', b"["):
        text = b'[{"ph":"X"},' + start + b"a" * 50_000 + b'"},{"ph":"M"}]'
        found, events = read(text, 1000, exact=True)
        assert found == [{"ph": "X"}, {"ph": "M"}]
        assert events.lost == ["an event is longer than 0 MiB"] and events.skipped > 1


def test_long_names_and_events() -> None:
    event = {"ph": "X", "name": "n" * 100_000, "args": {"x": ["y" * 100_000, list(range(100_000))]}}
    text = json.dumps([event, event, event]).encode()
    for size in (1 << 12, 1 << 16, 1 << 22):
        assert read(text, size)[0] == [event] * 3


def test_a_long_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_LIMIT_BYTES", 10_000)
    with pytest.raises(ArtifactError, match="has no list of traceEvents"):
        read(b'{"x":"' + b"a" * 50_000 + b'","traceEvents":[]}', 1000)


def test_a_long_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENT_LIMIT_BYTES", 1000)
    monkeypatch.setattr(module, "EVENT_LIMIT_BYTES", 1000)
    monkeypatch.setattr(module, "TAIL_LIMIT_BYTES", 10_000)
    found, events = read(b'{"traceEvents":[{"ph":"X"}],"x":"' + b"a" * 50_000 + b'"}', 1000)
    assert found == [{"ph": "X"}]
    assert events.lost == ["what stands after the events is too long and was not read"]


def test_much_damage_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WASTE_LIMIT", 10_000)
    parts = [DAMAGED["no value"] for _ in range(1000)]
    _, events = read(f"[{','.join(parts)}]".encode(), 1000, exact=True)
    assert events.lost == ["it is damaged in too many places and is not read on"]


@pytest.mark.parametrize("piece", [b'{"ph":1 ', b'{"ph":', b'"ph",', b'{"ph":1},', b"{", b"[", b'"', b"\\", b"]", b","])
def test_repeated_pieces_cost_linear_time(piece: bytes) -> None:
    for start in (b"[", b'[{"ph":"X","args":{"a":[1,', b'[{"ph":"X","name":"'):
        for exact in (False, True):
            found = Events("t.json", blocks(start + piece * 60_000, 1 << 16), exact=exact)
            assert sum(map(len, found.chunks())) <= 60_001 * len(piece) + 60_000


# -- numbers that JSON has no text for


def test_not_a_number() -> None:
    text = '{"ph":"X","ts":1,"dur":%s,"args":{"GB/s)":%s, "name": "std::nan, inf", "x":": nan,", "y\\"":"\\": inf}"}}'
    for value in ("nan", "-nan", "inf", "-inf", "+inf", "NaN", "Infinity", "-Infinity"):
        found, events = read(f"[{text % (value, value)}]".encode())
        assert found[0]["dur"] is None and found[0]["args"]["GB/s)"] is None
        assert found[0]["args"]["name"] == "std::nan, inf"
        assert found[0]["args"]["x"] == ": nan," and found[0]["args"]['y"'] == '": inf}'
        assert (events.lost, events.skipped) == ([], 0)


@pytest.mark.parametrize(
    "text", [b'"a":nano,', b'"a\\": nan,"', b'"x":": nan,"', b'{"a": "x: nan, y"}', b'"infinity": 1']
)
def test_no_null_in_a_text(text: bytes) -> None:
    assert with_null(text) == text


# -- what else the document says


def test_head_and_tail() -> None:
    text = (
        '{"schemaVersion":1,"deviceProperties":[{"id":0,"name":"A \u00fc","x":NaN}],"metadata":{"env":{"TOKEN":"s"}},'
        '"traceEvents":[],"distributedInfo":{"rank":3},"deviceProperties":[{"id":1}],"record_shapes":1}'
    )
    for size in (1, 10, 1 << 20):
        events = read(text.encode(), size)[1]
        assert events.head == {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 1}],
            "distributedInfo": {"rank": 3},
            "record_shapes": 1,
        }
        assert events.lost == []


DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = b"[" + b"0," * 3_000_000 + b"0]"


@pytest.mark.parametrize(
    ("head", "lost"),
    [
        (b'"schemaVersion":2,', []),
        (b'"schemaVersion":null,', []),
        (b'"schemaVersion":1,,', ["what stands before the events cannot be read"]),
        (b'"deviceProperties":' + DEEP + b",", ["what stands before the events cannot be read"]),
        (b'"deviceProperties":' + LONG + b",", ["deviceProperties cannot be read"]),
        (b'"other":' + LONG + b",", []),
        (b'"schemaVersion":1e999,', ["schemaVersion cannot be read"]),
        (b'"deviceProperties":[{"name":"\\ud800"}],', []),
        (b'"deviceProperties":[{"name":"\xff"}],', []),
        (b'"deviceProperties":[{"name":"a\tb"}],', []),
        (b'"other":"\\ud800\xff",', []),
    ],
)
def test_odd_heads(head: bytes, lost: list[str]) -> None:
    found, events = read(b"{" + head + b'"distributedInfo":{"rank":3},"traceEvents":[{"ph":"X"}]}')
    assert found == [{"ph": "X"}]
    assert events.lost == lost
    assert events.head.get("distributedInfo") == (None if "before" in str(lost) else {"rank": 3})
    json.dumps(events.head, ensure_ascii=False).encode()


def test_scan_says_where_it_was_cut() -> None:
    whole = b'{"ph":"X"},{"ph":"X","args":{"a":[1'
    assert scan(whole, last=False).rest == b'{"ph":"X","args":{"a":[1'
    assert scan(whole, last=True).cut and not scan(b'{"ph":"X"},{"ph":"X"}', last=True).cut
    found = scan(b'{"ph":"X"}] , "x": 1', last=False)
    assert (found.ended, found.rest) == (True, b' , "x": 1')


@pytest.mark.parametrize("text", ["\u00fc\u2603\U0001f600", "\x7f\x80", "\u2028"])
def test_characters_of_several_bytes(text: str) -> None:
    """No place to cut falls into a character."""
    event = {"name": text * 5, "ph": "X"}
    content = json.dumps([event] * 4, ensure_ascii=False).encode()
    for size in range(1, 40):
        assert read(content, size)[0] == [event] * 4


def test_what_is_no_text_is_kept_as_it_is() -> None:
    content = b'[{"name":"a\xff\xfe\xed\xa0\x80","ph":"X"},{"ph":"M"}]'
    for size in (1, 3, 1 << 20):
        chunks = b",".join(Events("t.json", blocks(content, size)).chunks())
        assert chunks == content[1:-1]
