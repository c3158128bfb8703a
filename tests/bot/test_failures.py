"""What failures of a forge become, and how long the bot is patient."""

from __future__ import annotations

import json

import pytest
from forge_clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from advisor.bot.forges.failures import Answer, BadToken, Patience, Request, failure, no_answer, own_words
from advisor.errors import ForgeConflict, ForgeError, ForgeMissing, ForgeRefused, ForgeUnavailable
from advisor.redact import Redactor

ASKED = Request(forge="GitHub", action="POST /repos/o/r/pulls", right="pull requests: write")
REDACTOR = Redactor(extra=("s3cretvalue",))
NOW = 1_800_000_000.0


def _failure(status: int, headers: dict[str, str] | None = None, text: str = '{"message": "words"}') -> ForgeError:
    return failure(ASKED, Answer(status=status, headers=headers or {}, text=text), REDACTOR, now=NOW)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, ForgeMissing),
        (307, ForgeMissing),
        (400, ForgeConflict),
        (401, BadToken),
        (403, ForgeRefused),
        (404, ForgeMissing),
        (405, ForgeConflict),
        (408, ForgeUnavailable),
        (409, ForgeConflict),
        (410, ForgeMissing),
        (413, ForgeConflict),
        (422, ForgeConflict),
        (429, ForgeUnavailable),
        (451, ForgeRefused),
        (500, ForgeUnavailable),
        (502, ForgeUnavailable),
        (503, ForgeUnavailable),
        (504, ForgeUnavailable),
        (599, ForgeUnavailable),
    ],
)
def test_every_status_has_one_meaning_and_shows_the_words_of_the_forge(status: int, kind: type[ForgeError]) -> None:
    error = _failure(status)
    assert type(error) is kind
    assert str(error).startswith(f"GitHub: POST /repos/o/r/pulls answered {status}: words")


def test_a_refusal_names_the_right_that_is_needed() -> None:
    assert "the token needs pull requests: write" in str(_failure(403))
    assert "expired" in str(_failure(401))


@pytest.mark.parametrize("status", [403, 429])
@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "17"}, 17.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": "999999999"}, 86_400.0),
        ({"retry-after": "Fri, 15 Jan 2027 08:01:00 GMT", "date": "Fri, 15 Jan 2027 08:00:00 GMT"}, 60.0),
        ({"retry-after": "Fri, 99 Jan 2027 08:01:00 GMT"}, None),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(NOW) + 90)}, 91.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOW) - 90)}, 0.0),
        ({"x-ratelimit-remaining": "0"}, 60.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "soon"}, 60.0),
        ({"ratelimit-remaining": "0", "ratelimit-reset": str(int(NOW) + 9)}, 10.0),
    ],
)
def test_a_rate_limit_says_when_to_come_back(status: int, headers: dict[str, str], wait_s: float | None) -> None:
    error = _failure(status, headers)
    if wait_s is None and status == 403:
        assert type(error) is ForgeRefused  # no time that can be read: what is left is a refusal
        return
    assert isinstance(error, ForgeUnavailable)
    assert error.retry_after_s == (60.0 if wait_s is None else wait_s)


def test_the_wait_is_by_the_clock_of_the_forge() -> None:
    headers = {"date": "Fri, 15 Jan 2027 08:00:00 GMT", "x-ratelimit-remaining": "0"}
    reset = 1_800_000_000 + 30  # that moment, and half a minute
    error = failure(
        ASKED,
        Answer(status=403, headers={**headers, "x-ratelimit-reset": str(reset)}, text=""),
        REDACTOR,
        now=NOW + 500,
    )
    assert isinstance(error, ForgeUnavailable)
    assert error.retry_after_s == 31.0


def test_a_secondary_limit_without_a_time_waits_a_minute() -> None:
    error = _failure(403, text='{"message": "You have exceeded a secondary rate limit. Please wait."}')
    assert isinstance(error, ForgeUnavailable)
    assert error.retry_after_s == 60.0


def test_a_remaining_budget_is_no_limit() -> None:
    headers = {"x-ratelimit-remaining": "4999", "x-ratelimit-reset": str(int(NOW) + 90)}
    assert type(_failure(403, headers)) is ForgeRefused


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {
                "message": "Validation Failed",
                "errors": [{"resource": "PullRequest", "code": "invalid", "field": "head"}],
            },
            "Validation Failed; PullRequest head invalid",
        ),
        ({"message": "Validation Failed", "errors": [{"code": "custom", "message": "No commits"}]}, "No commits"),
        ({"message": "Unprocessable Entity", "errors": ["Line could not be resolved"]}, "Line could not be resolved"),
        ({"message": {"title": ["is too long", "is bad"]}}, "title is too long; title is bad"),
        ({"error": "invalid_token", "error_description": "Token was revoked."}, "invalid_token; Token was revoked."),
        ({"message": "token s3cretvalue of ghp_0123456789abcdefghijABCD"}, "token <redacted> of <redacted>"),
        ({"message": "a\u202eb\x1b[31m\nc"}, "a\\u202eb\\x1b[31m c"),
        ([1, None, {"x": 3}], ""),
        ("bare words", "bare words"),
        ({"message": None, "errors": None}, ""),
    ],
)
def test_the_words_of_the_forge_are_shown_redacted_and_visible(body: object, words: str) -> None:
    assert words in own_words(json.dumps(body), REDACTOR)


def test_the_words_are_short_whatever_the_answer_is() -> None:
    deep = "[" * 100_000
    for text in ("<html>" + "x" * 100_000, deep, json.dumps({"message": "y" * 100_000}), json.dumps(["z"] * 10_000)):
        assert len(own_words(text, REDACTOR)) < 600


@given(st.integers(300, 599), st.dictionaries(st.sampled_from(["retry-after", "date"]), st.text()), st.text())
def test_nothing_that_a_server_sends_breaks_the_mapping(status: int, headers: dict[str, str], text: str) -> None:
    error = _failure(status, {**headers, "x-ratelimit-remaining": "0", "x-ratelimit-reset": text}, text)
    assert isinstance(error, ForgeError)
    assert "\n" not in str(error)


def test_a_connection_that_breaks_is_told_without_the_token() -> None:
    error = no_answer(ASKED, ConnectionResetError("reset while sending s3cretvalue\nto x"), REDACTOR)
    assert str(error) == (
        "GitHub: POST /repos/o/r/pulls got no usable answer: ConnectionResetError: reset while sending <redacted> to x"
    )


# ------------------------------------------------------------------------------------------------------------ patience


class _Flaky:
    """Fails a number of times, then gives 7."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.times, self.calls, self.error = times, 0, error or ForgeUnavailable("down")

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return 7


def _patience(clock: Clock, limit_s: float = 100.0, draw: float = 1.0) -> Patience:
    return Patience(limit_s=limit_s, sleep=clock.sleep, clock=clock.now, draw=lambda: draw)


def test_waits_double_and_are_drawn_from_their_upper_half() -> None:
    for draw, expected in ((1.0, [1.0, 2.0, 4.0, 8.0]), (0.0, [0.5, 1.0, 2.0, 4.0])):
        clock = Clock()
        assert _patience(clock, draw=draw).call(_Flaky(4)) == 7
        assert clock.slept == expected


def test_patience_ends_within_its_limit_and_says_how_often_it_tried() -> None:
    clock = Clock()
    with pytest.raises(ForgeUnavailable, match=r"^down \(tried 8 times\)$"):
        _patience(clock).call(_Flaky(1000))
    assert clock.now() <= 100.0
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_without_patience_there_is_one_try() -> None:
    attempt = _Flaky(1)
    with pytest.raises(ForgeUnavailable, match=r"^down$"):
        _patience(Clock(), limit_s=0.0).call(attempt)
    assert attempt.calls == 1


def test_a_forge_that_names_a_time_is_waited_for_within_patience() -> None:
    clock = Clock()
    assert _patience(clock).call(_Flaky(1, ForgeUnavailable("limit", retry_after_s=40.0))) == 7
    assert clock.slept == [40.0]
    with pytest.raises(ForgeUnavailable, match="limit; try again in 400 s") as caught:
        _patience(clock).call(_Flaky(1, ForgeUnavailable("limit", retry_after_s=400.0)))
    assert caught.value.retry_after_s == 400.0


def test_a_time_of_zero_does_not_make_it_hammer() -> None:
    clock = Clock()
    _patience(clock).call(_Flaky(3, ForgeUnavailable("limit", retry_after_s=0.0)))
    assert clock.slept == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("error", [ForgeRefused("no"), ForgeMissing("no"), ForgeConflict("no"), ValueError("bug")])
def test_other_errors_are_raised_at_once(error: Exception) -> None:
    attempt = _Flaky(1, error)
    with pytest.raises(type(error)):
        _patience(Clock()).call(attempt)
    assert attempt.calls == 1


def test_before_an_attempt_is_repeated_the_forge_is_asked_whether_it_worked() -> None:
    attempt = _Flaky(5)
    asked: list[int] = []

    def done() -> int | None:
        asked.append(attempt.calls)
        return 9 if len(asked) == 2 else None

    assert _patience(Clock()).call(attempt, done=done) == 9
    assert asked == [1, 2]
    assert attempt.calls == 2


def test_a_look_that_fails_is_no_reason_to_repeat_the_attempt() -> None:
    attempt = _Flaky(1)
    look = _Flaky(2)
    assert _patience(Clock()).call(attempt, done=lambda: look() and None) == 7
    assert (attempt.calls, look.calls) == (2, 3)
