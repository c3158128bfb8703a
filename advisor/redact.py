"""The one redactor: secrets, home paths, user and host names and private addresses leave everything shown or stored.

Profiler traces in the wild carry whole environment dumps with live tokens. A secret is known by its shape (token
prefixes, key blocks, credentials in URLs) or by the name it is assigned to. No pattern can start a long scan at more
than one place of the same run of characters, so that the time is linear in the length of the text.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import getpass
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

Value = TypeVar("Value")
Match: TypeAlias = "re.Match[str]"

REDACTED, USER, HOST, ADDRESS, EMAIL, MAC = "<redacted>", "<user>", "<host>", "<address>", "<email>", "<mac>"
_PLACEHOLDERS = (REDACTED, USER, HOST, ADDRESS, EMAIL, MAC, "~")
_PASSES = 6  # a replacement can uncover the edge of the next match; text settles after two or three passes


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Redactor:
    """Replaces secrets and whatever identifies a person, a machine or a network; `<redacted>`, `~` and so on remain.

    `home`, `user` and `host` are literals of one machine, `extra` further ones to blank. Names shorter than three
    characters and common words ("root", "user", "localhost", "adam") are left alone, a host is also known by its first
    label. Applying it twice changes nothing more.
    """

    home: str | None = None
    user: str | None = None
    host: str | None = None
    extra: tuple[str, ...] = ()

    @classmethod
    def of_machine(cls, extra: tuple[str, ...] = ()) -> Redactor:
        """The redactor for the machine and account this process runs on."""
        return cls(home=_home(), user=_user(), host=socket.gethostname() or None, extra=extra)

    def text(self, text: str) -> str:
        """`text` with everything of the classes above replaced."""
        for _ in range(_PASSES):
            cleaned = self._once(text)
            if cleaned == text:
                break
            text = cleaned
        return text

    def value(self, value: Value) -> Value:
        """`value` with every string in it redacted: mappings with their keys, lists, tuples, sets, paths, dataclasses.

        Types are kept. A string under a key such as `HF_TOKEN`, or behind a flag such as `--password`, goes whatever it
        looks like. Numbers, enumeration members and objects of other types are returned as they are.
        """
        cleaned: Any = self._any(value)
        return cleaned  # type: ignore[no-any-return]

    def _once(self, text: str) -> str:
        folded = text.casefold()
        for rule in _RULES:
            if any(needle in folded for needle in rule.needles):
                text = rule.pattern.sub(rule.replace, text)
        names = _names(self)
        return names.pattern.sub(names.replace, text) if names is not None else text

    def _any(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value
        if type(value) is str:
            return _remembered(self, value) if len(value) <= 256 else self.text(value)
        if isinstance(value, Path):
            return type(value)(self.text(str(value)))
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._under(name, item) for name, item in zip(value._fields, value, strict=True)))
        if isinstance(value, list | tuple):
            return type(value)(self._arguments(value))
        if isinstance(value, set | frozenset):
            return type(value)(self._any(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return value

    def _under(self, key: Any, value: Any) -> Any:
        if type(key) is str and type(value) is str:
            replacement = _replacement_for(key, value)
            if replacement is not None:
                return replacement
        return self._any(value)

    def _mapping(self, mapping: Mapping[Any, Any]) -> Any:
        cleaned: dict[Any, Any] = {}
        for key, value in mapping.items():
            name = self._any(key)
            unique, count = name, 1
            while unique in cleaned:  # two folders of two users are both "~"
                count += 1
                unique = f"{name} ({count})"
            cleaned[unique] = self._under(key, value)
        if type(mapping) is dict or not isinstance(mapping, MutableMapping):
            return MappingProxyType(cleaned) if isinstance(mapping, MappingProxyType) else cleaned
        clone = copy.copy(mapping)
        clone.clear()
        clone.update(cleaned)
        return clone

    def _arguments(self, items: list[Any] | tuple[Any, ...]) -> list[Any]:
        cleaned: list[Any] = []
        flag: str | None = None
        for item in items:
            cleaned.append(self._any(item) if flag is None else self._under(flag, item))
            is_flag = type(item) is str and item.startswith("--") and "=" not in item
            flag = item.lstrip("-") if is_flag else None
        return cleaned

    def _dataclass(self, value: Any) -> Any:
        changes = {}
        for field in dataclasses.fields(value):
            if field.init:
                before = getattr(value, field.name)
                after = self._under(field.name, before)
                if after is not before:
                    changes[field.name] = after
        return dataclasses.replace(value, **changes) if changes else value


@lru_cache(maxsize=1 << 16)
def _remembered(redactor: Redactor, text: str) -> str:
    """Kernel and operator tables repeat a few names very often."""
    return redactor.text(text)


# Settings that make two runs comparable. A variable that is not named here is never recorded.
_RECORDED = _words(
    """
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS KMP_AFFINITY KMP_BLOCKTIME GOMP_CPU_AFFINITY
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING
    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE CUDNN_LOGINFO_DBG NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HSA_OVERRIDE_GFX_VERSION PYTORCH_TUNABLEOP_ENABLED
    PYTORCH_MIOPEN_SUGGEST_NHWC
    PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING
    NCCL_ALGO NCCL_PROTO NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_IB_DISABLE NCCL_SHM_DISABLE NCCL_NVLS_ENABLE
    NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_BUFFSIZE NCCL_CUMEM_ENABLE NCCL_DEBUG
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_HIGH_PRIORITY
    TORCH_LOGS TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_FREEZING
    TORCHINDUCTOR_FX_GRAPH_CACHE TORCHINDUCTOR_COMPILE_THREADS TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    TORCH_CUDNN_V8_API_DISABLED TORCH_USE_CUDA_DSA
    WORLD_SIZE LOCAL_WORLD_SIZE RANK LOCAL_RANK GROUP_RANK PYTHONHASHSEED PYTHONOPTIMIZE TOKENIZERS_PARALLELISM
    """
)


def environment_allow_list(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` worth recording with a run, sorted by name, their values redacted."""
    redactor = Redactor.of_machine()
    return {name: redactor.text(environ[name]) for name in sorted(_RECORDED & environ.keys())}


def _home() -> str | None:
    try:
        return str(Path.home())
    except RuntimeError:
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # an account without an entry in the user database
        return None


# ------------------------------------------------------------------------------------------------ literals of a machine

_COMMON = _words(
    """
    root user users username admin administrator guest nobody daemon local localhost localdomain host hostname node
    server worker master main home work test dev prod build data docker container runner ubuntu debian fedora centos
    ec2-user vagrant jovyan jenkins gitlab github azure python torch cuda gpu cpu model train step loss adam adamw lion
    max min mean norm cat stack ray jax token key value query redacted address email mac tmp opt usr var src lib bin
    """
)


@dataclass(frozen=True, slots=True)
class _Names:
    """The literals of a redactor: a pattern for all of them, and what stands for each (in lower case)."""

    pattern: re.Pattern[str]
    placeholders: Mapping[str, str]

    def replace(self, match: Match) -> str:
        return self.placeholders[match[0].lower()]


@lru_cache(maxsize=64)
def _names(redactor: Redactor) -> _Names | None:
    placeholders: dict[str, str] = {}
    patterns: list[str] = []
    hosts = [redactor.host, redactor.host.split(".")[0]] if redactor.host else []
    groups: list[tuple[str, list[str | None], Callable[[str], bool]]] = [
        (REDACTED, list(redactor.extra), lambda name: not any(name in held for held in _PLACEHOLDERS)),
        ("~", [redactor.home], lambda name: len(name.strip("/\\")) > 2),
        (HOST, [*hosts], _telling),
        (USER, [redactor.user], _telling),
    ]
    for placeholder, literals, admits in groups:
        for literal in sorted(filter(None, literals), key=len, reverse=True):
            if admits(literal) and literal.lower() not in placeholders:
                placeholders[literal.lower()] = placeholder
                patterns += _whole(literal, any_case=placeholder == HOST)
    if not patterns:
        return None
    held = [re.escape(text) for text in _PLACEHOLDERS if text != "~"]
    placeholders.update({text: text for text in _PLACEHOLDERS})
    return _Names(re.compile("|".join(held + patterns)), placeholders)


def _telling(name: str) -> bool:
    return len(name) > 2 and not name.isdigit() and name.lower() not in _COMMON


def _whole(literal: str, *, any_case: bool) -> list[str]:
    """Patterns for the literal as a whole word, as far as its ends are word characters."""
    is_word = re.match(r"\w", literal[0]) is not None
    before = r"(?:(?<![A-Za-z0-9_].)|(?<=\\[nrt].))" if is_word else r"(?<![\w.~].)"
    after = r"(?![A-Za-z0-9_])" if re.match(r"\w", literal[-1]) else ""
    rest = f"(?i:{re.escape(literal[1:])})" if any_case else re.escape(literal[1:])
    firsts = {literal[0].lower(), literal[0].upper()} if any_case else {literal[0]}
    return [re.escape(first) + before + rest + after for first in sorted(firsts)]


# ---------------------------------------------------------------------------------------- secrets by the name they have

_STRONG = _words(
    """
    password passwords passwd passphrase pwd secret secrets credential credentials apikey accesskey secretkey privatekey
    authtoken accesstoken sessionkey
    """
)
_WEAK = frozenset({"token", "key", "authorization"})
# Words that make a credential of a token or key; those of the second set do so whatever else is in the name.
_CREDENTIAL = _words(
    """
    account encryption signing service license subscription bot personal security deploy hf hub huggingface wandb openai
    anthropic github gitlab slack aws azure gcp google ngc npm pypi comet neptune kaggle client storage shared webhook
    ssh jwt
    """
)
_CERTAIN = _words("api access auth oauth refresh bearer private secret session")
# Words of the vocabulary, of caches and of attention; and last words of names that only speak about a secret.
_HARMLESS = _words(
    """
    pad eos bos unk mask sep cls eot start end stop image audio video special next last first prev num max min new per
    total cache primary foreign sort group dict hash state config metric map public padding partition index idx query kv
    heads embedding emb usage dropout dtype layer
    """
)
_ABOUT = _words("count len length size name names path file dir type types dim limit url env py pyi ipynb")
_TYPES = _words(
    """
    none null true false nil str string bytes int integer float bool boolean any object optional tensor array list dict
    tuple callable path secretstr required val value option options flag flags argument and or is to from in
    """
)
_HOLDERS = _words("self cls args cfg config conf settings os env environ opts options params kwargs hparams ctx")
_HOST_KEYS = re.compile(
    r"hostname|host_name|computername|slurmd?_(?:nodename|submit_host|nodelist|job_nodelist)", re.IGNORECASE
)
_USER_KEYS = re.compile(r"user|username|logname|sudo_user|slurm_job_user", re.IGNORECASE)


def _replacement_for(key: str, value: str) -> str | None:
    """What a text stored under `key` becomes because of the key; `None` where the key says nothing."""
    if _HOST_KEYS.fullmatch(key) and re.fullmatch(r"[\w.-]+", value) and value.lower() not in _COMMON:
        return HOST
    if key.isupper() and _USER_KEYS.fullmatch(key) and re.fullmatch(r"[\w.-]+", value) and value.lower() not in _COMMON:
        return USER
    strength = _strength(key, is_flag=key == "token")
    if strength is not None and key.isupper():
        strength = "strong"
    return REDACTED if _is_secret(strength, value, quoted=True) else None


@lru_cache(maxsize=4096)
def _strength(name: str, *, is_flag: bool = False) -> str | None:
    """Whether a name is one of a secret ("strong"), may be one ("weak") or is none (`None`)."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    known = set(words)
    if not known & (_STRONG | _WEAK) or words[-1] in _ABOUT or name in {"PWD", "OLDPWD"}:
        return None
    if known & (_STRONG | _CERTAIN) or is_flag:
        return "strong"
    if known & _HARMLESS or ("token" in known and known & {"id", "ids"}):
        return None
    return "strong" if known & _CREDENTIAL else "weak"


def _is_secret(strength: str | None, value: str, *, quoted: bool) -> bool:
    if strength is None or not value or value[0] in "<[{$%(),;: " or value.lower().rstrip(".") in _TYPES:
        return False
    if strength == "strong":
        return not (_names_a_secret(value) if quoted else _is_expression(value))
    return _looks_random(value)


def _names_a_secret(value: str) -> bool:
    """Whether a quoted value is itself the name of a variable, as in `ENV = "GITHUB_TOKEN"`."""
    return bool(re.fullmatch(r"[A-Z]+(?:_[A-Z]+)+", value)) and _strength(value) is not None


def _is_expression(value: str) -> bool:
    """Whether an unquoted value is a name in a program rather than a literal."""
    if not re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", value):
        return False
    first, *rest = value.split(".")
    if rest and first in _HOLDERS:
        return True
    return bool(re.fullmatch(r"[A-Za-z_.]+", value)) and _strength((rest or [first])[-1]) is not None


def _looks_random(value: str) -> bool:
    """Whether a value under a merely suspicious name has letters and digits mixed as no identifier has them."""
    if not re.fullmatch(r"[A-Za-z0-9_\-+/=.~]{6,}", value) or value[0] in "/.~":
        return False
    if re.match(r"0x|(?:torch\.)?(?:b?float|u?int|complex|fp|bf)\d|\d+(?:x\d+)+$", value):
        return False
    if not (re.search(r"[A-Za-z]", value) and re.search(r"\d", value)):
        return False
    words = re.split(r"[._/+=-]", value)
    if all(re.fullmatch(r"[A-Za-z]*\d{0,3}|\d{1,6}", word) for word in words):
        return len(words) == 1 and bool(re.search(r"\d{3}$", value))
    return True


def _assigned(match: Match) -> str:
    name = _leading(match.string, match.start()) + match["word"] + match["tail"]
    quoted, value = match["quoted"] is not None, match["quoted"] or match["bare"]
    strength = _strength(name)
    if strength == "weak" and _is_certain(match, name, value):
        strength = "strong"
    if strength is None or (match["word"].lower() == "pwd" and value[0] in "/~"):
        return match[0]
    if not quoted and _in_code(match, value, strength):
        return match[0]
    if not _is_secret(strength, value, quoted=quoted):
        return match[0]
    start = match.start("quoted" if quoted else "bare") - match.start()
    return match[0][:start] + REDACTED + match[0][start + len(value) :]


def _is_certain(match: Match, name: str, value: str) -> bool:
    """Whether a token or key is one for certain by where it stands: in an environment, a query, or as one long word."""
    separator, before = match["separator"], match.string[max(0, match.start() - 1) : match.start()]
    if name.isupper() and not re.fullmatch(r"\s+=\s*|:\s*", separator):
        return True  # as in a shell or a JSON dump, not as a constant of a program
    in_yaml = name.isupper() and ":" in separator
    if match["word"].lower() == "token" and (in_yaml or re.fullmatch("[A-Za-z]{12,}", value)):
        return True
    return before in {"?", "&"} and separator == "="


def _in_code(match: Match, value: str, strength: str) -> bool:
    """Whether an unquoted value stands where a program has a name: a call, an annotation, a statement."""
    separator, after = match["separator"], match.string[match.end() : match.end() + 3]
    if not re.fullmatch(r"[A-Za-z_][\w.]*", value):
        return False
    if after[:1] in {"(", "["}:
        return True
    if ":" in separator and not re.search("[\"']", separator):
        annotation = value.lstrip("_")[:1].isupper() and after.lstrip()[:1] in {"|", "=", ",", ")"}
        return annotation or len(value) < 4 or (strength == "weak" and bool(re.fullmatch(r"\D+\d{0,3}", value)))
    return separator.strip(" \t") != separator and bool(re.fullmatch(r"\D*[._]\D*|\D{1,3}", value))


def _leading(text: str, end: int) -> str:
    """The part of an identifier that stands before `end`, at most 64 characters of it."""
    start = end
    while start > max(0, end - 64) and (text[start - 1].isalnum() or text[start - 1] in "_-"):
        start -= 1
    escaped = start > 0 and text[start - 1] == "\\" and text[start:end][:1] in {"n", "r", "t"}
    return text[start + escaped : end]


def _flagged(match: Match) -> str:
    strength = _strength(match["name"], is_flag=match["name"].lower() == "token")
    if not _is_secret(strength, match["value"], quoted=True):
        return match[0]
    return match[0][: match.start("value") - match.start()] + REDACTED


def _labelled(match: Match) -> str:
    upper, value = match["name"].isupper(), match["value"]
    code = match.string[match.end() : match.end() + 1] in {"(", "["} or re.fullmatch(r"[\d.]+", value)
    if code or value.lower() in _COMMON | _TYPES or not (upper or match["quote"]):
        return match[0]
    if not upper and _USER_KEYS.fullmatch(match["name"]):
        return match[0]
    return match[0][: -len(value)] + (USER if _USER_KEYS.fullmatch(match["name"]) else HOST)


# ---------------------------------------------------------------------------------------------- addresses and locations

_SHARED = ipaddress.ip_network("100.64.0.0/10")
_VERSION_BEFORE = re.compile(
    r"(?:[=~<>!]=|version\W{0,6}|[A-Za-z0-9_]-|(?:cu\d\d|cuda|curand|cublas|cudnn|nccl|driver|rocm)\S*\s+)\Z",
    re.IGNORECASE,
)


def _network(match: Match) -> str:
    """A private, link-local or carrier address is replaced; loopback, public addresses and version numbers stay."""
    before = match.string[max(0, match.start() - 64) : match.start()]
    try:
        address = ipaddress.ip_address(match["ip"])
    except ValueError:
        return match[0]
    private = address.is_private or (address.version == 4 and address in _SHARED)
    if not private or address.is_loopback or address.is_unspecified or _VERSION_BEFORE.search(before):
        return match[0]
    return ADDRESS


# A pattern starts with a literal or a set of characters, which the matcher skips to, and looks behind it only there.
_TOKENS = (
    r"gh[pousr]_[A-Za-z0-9]{16,}",
    r"github_pat_[A-Za-z0-9_]{16,}",
    r"gl(?:pat|dt|rt|ptt|cbt|soat|ft|imt|agent)-[A-Za-z0-9_.-]{16,}",
    r"xox[abeoprs](?:\.[a-z]{1,6})?-[A-Za-z0-9-]{8,}",
    r"xapp-[A-Za-z0-9-]{8,}",
    r"A(?:KIA|SIA|BIA|CCA|GPA|IDA|IPA|NPA|ROA)[A-Z0-9]{12,}",
    r"hf_[A-Za-z0-9]{20,}",
    r"api_org_[A-Za-z0-9]{20,}",
    r"s(?<![_-]s)k-(?=[A-Za-z_-]{0,200}[0-9])[A-Za-z0-9_-]{16,}",
    r"AIza[A-Za-z0-9_-]{30,}",
    r"ya29\.[A-Za-z0-9_-]{16,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)*",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[A-Za-z0-9_-]{30,}",
    r"sk_(?:live|test)_[A-Za-z0-9]{10,}",
    r"rk_(?:live|test)_[A-Za-z0-9]{10,}",
    r"gsk_[A-Za-z0-9]{30,}",
    r"r8_[A-Za-z0-9]{30,}",
    r"nvapi-[A-Za-z0-9_-]{20,}",
    r"dapi[0-9a-f]{32}(?:-\d)?(?![A-Za-z0-9])",
    r"hvs\.[A-Za-z0-9_-]{20,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
)
_TOKEN_NEEDLES = _words(
    "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- gldt- glrt- glptt- glcbt- glsoat- glft- glimt- glagent- xox xapp- "
    "akia asia abia acca agpa aida aipa anpa aroa hf_ api_org_ sk- aiza ya29. eyj npm_ pypi- k_live_ k_test_ gsk_ r8_ "
    "nvapi- dapi hvs. sg."
)


def _starting(edge: str, *patterns: str) -> str:
    """Alternatives whose first character must stand at an edge; `edge` is written with a dot for that character."""
    return "(?:" + "|".join(pattern[0] + edge + pattern[1:] for pattern in patterns) + ")"


_WORD_EDGE = r"(?:(?<![A-Za-z0-9].)|(?<=\\[nrt].))"
_PATH_EDGE = r"(?:(?<![\w.~>-].)|(?<=\\[nrt].)|(?<=-[A-Za-z].))"
_ASSIGNMENT = r"""
    (?P<word>[tTsSpPcCaAkK](?i:(?<=t)oken|(?<=s)ecret|(?<=p)assw(?:or)?d|(?<=p)assphrase|(?<=p)wd|(?<=c)redential
       |(?<=a)pi[_-]?key|(?<=a)uthorization|(?<=k)ey))
    (?=(?P<tail>[A-Za-z0-9_-]{0,24}))(?P=tail)
    (?P<separator>\\{0,3}["']?[ \t]{0,4}(?:=>|:=|[=:](?![=:]))[ \t]{0,4})
    (?:[rbfuRBFU]{0,2}(?P<quote>\\{0,3}["'])(?P<quoted>[^\n]{1,4096}?)(?P=quote)
      |(?P<bare>[^\s"'`,;&()<>{}\[\]|\\]+))
"""
_LABEL = r"""
    (?P<name>[hHlLuUsScC](?<![A-Za-z0-9_].)(?i:(?<=h)ost_?name|(?<=c)omputername|(?<=l)ogname|(?<=u)ser(?:name)?
       |(?<=s)udo_user|(?<=s)lurmd?_(?:nodename|submit_host|nodelist|job_nodelist|job_user)))
    \\{0,3}["']?[ \t]{0,4}[=:](?![=:])[ \t]{0,4}(?P<quote>\\{0,3}["'])?(?P<value>[A-Za-z0-9][\w.-]*)
"""
_PEM = r"""
    -----BEGIN\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
    (?:[^-]*(?:-(?!----)[^-]*)*-----END\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----|[A-Za-z0-9+/=\s\\]*)
"""
_LEAD = (
    r"/(?:[a-z]|data|mnt|nfs|export|scratch|gpfs|lustre|storage|shared|net|var|usr|fs\w{0,8}|volumes?|cluster|work)"
    r"(?:/[\w.-]{1,32}){0,2}/(?:home|[Uu]sers)"
)
_HOME = _starting(_PATH_EDGE, _LEAD, "/home", "/Users") + r"/[\w@+-]+(?:\.[\w@+-]+)*"
_ROOT = _starting(_PATH_EDGE + r"(?<!/.)", r"/root(?![\w-]|\.\w)")
_WINDOWS = r"""
    [A-Za-z](?<![A-Za-z0-9].):[\\/]{1,4}(?i:users|documents\ and\ settings)[\\/]{1,4}
    (?:[^\\/\s"':*?<>|]+(?:\ [^\\/\s"':*?<>|]+){0,3}(?=[\\/])|[^\\/\s"':*?<>|,;]+)
"""
_TLD = (
    "com|org|net|edu|gov|mil|int|info|biz|dev|app|cloud|tech|xyz|online|site|email|company|systems|science|academy|"
    "network|solutions|group|inc|llc|pro|name|internal|local|localdomain|lan|corp|intranet|invalid|example|test"
)
_EMAIL = (
    r"[\w.%+-](?<![\w.%+-].)(?<!g(?=it@))[\w.%+-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*"
    rf"\.(?:(?i:{_TLD})|(?!to|py|so|mt)[a-z]{{2}})(?![\w(\[-]|\.\w)"
)
_PROSE = r"(?:tokens?|auth[a-z]*|schemes?|headers?|credentials?|format|based|requests?)\b"


@dataclass(frozen=True, slots=True)
class _Rule:
    """A pattern, tried only where one of the (lower-case) needles occurs."""

    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    replace: str | Callable[[Match], str]


def _rule(needles: str, pattern: str, replace: str | Callable[[Match], str], flags: int = 0) -> _Rule:
    return _Rule(tuple(needles.split("|")), re.compile(pattern, flags), replace)


_RULES = (
    _rule("private key", _PEM, REDACTED, re.VERBOSE),
    _rule(
        "://",
        r"""(?<=://)(?!git@)(?:[^\s/?\#"'`<>]+@|[^\s/?\#@:"'`<>]+:(?!\d{1,5}[/?\#])[^\s/"'`<>]+@)""",
        REDACTED + "@",
        re.VERBOSE,
    ),
    _rule("|".join(sorted(_TOKEN_NEEDLES)), _starting(_WORD_EDGE, *_TOKENS), REDACTED),
    _rule("hooks.slack", r"(hooks\.slack\.com/)(?:services|workflows)/[A-Za-z0-9/_-]+", rf"\1{REDACTED}"),
    _rule(
        "bearer", rf"([bB](?<!\w.)(?i:earer)[ \t]{{1,4}})(?i:(?!{_PROSE}))[A-Za-z0-9._~+/=-]{{6,}}", rf"\1{REDACTED}"
    ),
    _rule(
        "authorization",
        r"([aA](?<!\w.)(?i:uthorization\W{1,8}(?:basic|token|digest|apikey|negotiate))[ \t]{1,4})"
        r"[A-Za-z0-9._~+/=-]{4,}",
        rf"\1{REDACTED}",
    ),
    _rule("token|secret|passw|passphrase|pwd|credential|key|authorization", _ASSIGNMENT, _assigned, re.VERBOSE),
    _rule(
        "--",
        r"""--(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,40})[ \t]{1,4}["']?(?P<value>[^\s"'-][^\s"']*)""",
        _flagged,
    ),
    _rule("wandb", r"([wW](?i:andb)[^\n]{0,20}login[^\n]{0,60}?)\b[0-9a-f]{40}\b", rf"\1{REDACTED}"),
    _rule("login", r"([lL](?<!\w.)(?i:ogin\s{1,4}\S{1,100}\s{1,4}password)\s{1,4})\S+", rf"\1{REDACTED}"),
    _rule("user|hostname|host_name|logname|computername|slurm", _LABEL, _labelled, re.VERBOSE),
    _rule(r":\users|:/users|:\\users|:\documents|:\\documents", _WINDOWS, "~", re.VERBOSE),
    _rule("/home|/users", _HOME, "~"),
    _rule("/root", _ROOT, "~"),
    _rule("ip-", _starting(_WORD_EDGE, r"ip-(?:\d{1,3}-){3}\d{1,3}(?![\w-])(?:\.[a-z][a-z0-9-]*)*"), HOST),
    _rule(
        ":|-",
        r"[0-9A-Fa-f](?<![\w:-].)[0-9A-Fa-f](?:(?::[0-9A-Fa-f]{2}){5}|(?:-[0-9A-Fa-f]{2}){5})(?![:-]?\w)",
        MAC,
    ),
    _rule(
        "fc|fd|fe",
        r"(?P<ip>[fF](?<![\w:.].)(?i:[cd][0-9a-f]{2}|e[89ab][0-9a-f]):[0-9A-Fa-f:]{1,40})(?:%[\w.-]{1,20})?(?![\w:])",
        _network,
    ),
    _rule(
        "10.|172.|192.|169.|100.",
        r"(?P<ip>1(?:(?<![\w.].)|(?<=\\[nrt].))(?:0|72|92|69|00)(?:\.\d{1,3}){3})(?!\w|\.\d)",
        _network,
    ),
    _rule("@", _EMAIL, EMAIL),
)
