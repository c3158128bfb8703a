"""Texts that try to act on a page: made by hand, and put together by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS = (
    "@user @org/team (@user) .@user&#64;user &commat;user",
    "#12 GH-1 gh-2 owner/repo#3 user#4 fixes #5 Closes: owner/repo#6 resolves https://github.com/a/b/issues/7",
    "!1 ~bug ~\"two words\" %\"v 1\" $12 &3 ^alert#4 [issue:5] [[_TOC_]] *iteration:\"x\" group/project!8",
    "/close\n/merge\n  /label ~x",
    "<img src=x onerror=alert(1)> <script>x</script> </details></code></td> <!-- advisor:report --> <?x?> <!DOCTYPE x>",
    "[a](javascript:x) ![b](http://x.y/z.png) [c][d] [^1] <https://x.y> [d]: http://x.y",
    "https://example.org www.example.org ftp://x.y mailto:a@b.org somebody@example.org xmpp:a@b.c",
    "| a | b |\n|---|---|\n| c | d |",
    "# heading\n## two\nx\n===\ny\n---\n* * *",
    "```\nfence\n~~~\n````",
    "`a` ``b`` `c",
    "*a* **b** _c_ __d__ ~~e~~ ***",
    "- a\n+ b\n* c\n1. d\n2) e\n- [ ] f\n> q\n> [!WARNING]",
    "$x$ $$y$$ $`z`$ \\(a\\)",
    ":tada: :+1: :octocat:",
    "\u202eabc\u2066 \u200b\ufeff \x1b[31m \x00 \ud800 \U000e0041",
    "    code\n\tcode",
    "\\ \\\\ \\` \\| a\\",
    "deadbeef 1234567 0123456789abcdef0123456789abcdef01234567",
    "Co-authored-by: A B <a@b.c>\nSigned-off-by: x [skip ci] [ci skip] ***NO_CI*** skip-checks: true",
    "&lt;b&gt; &#60;b&#62; &amp;#60; &#x40;user",
    "a\r\nb\u2028c\x85d\x0be",
    "Draft: x",
)  # fmt: skip

_PIECES = [piece for text in TEXTS for piece in text.split(" ")] + list("`|*_#@!~$%^&<>[]()\\/-+=:.\n\r\t \"'") + [
    "user", "12", "x", "://", "www.", "fix", "close ", "<!--", "-->", "</details>", "```", "@@ -1,9 +1,9 @@\n",
]  # fmt: skip

texts = st.lists(st.one_of(st.sampled_from(_PIECES), st.characters()), max_size=12).map("".join)
"""Hostile texts; they may hold anything that a Python string can."""
