"""The redactor removes secrets and identities and leaves code, numbers and names of the field as they are."""

from __future__ import annotations

import enum
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.model import Environment, Evidence, Safety
from advisor.redact import Redactor, environment_allow_list

REDACTOR = Redactor(home="/data/alice", user="alice", host="trainbox7.corp.example", extra=("moonshot",))
ALNUM36 = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6"  # tokens are put together here so that no scanner takes them for real
HEX40 = "0123456789abcdef" * 2 + "01234567"

TOKENS = [
    "ghp_" + ALNUM36,
    "gho_" + ALNUM36,
    "ghs_" + ALNUM36,
    "ghu_" + ALNUM36,
    "github_pat_" + "11ABCDEFG0" + ALNUM36 + "_" + ALNUM36,
    "glpat-" + ALNUM36[:20],
    "xoxb-" + "123456789012-123456789012-" + ALNUM36[:24],
    "xapp-" + "1-A012345-6789-" + ALNUM36,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ASIA" + "IOSFODNN7EXAMPLE",
    "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "sk-" + ALNUM36,
    "sk-proj-" + ALNUM36 + "-" + ALNUM36,
    "sk-ant-api03-" + ALNUM36,
    "AIza" + ALNUM36[:35],
    "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0." + "SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c",
    "npm_" + ALNUM36,
    "nvapi-" + ALNUM36,
    "rk_live_" + ALNUM36[:24],
    "dapi" + HEX40[:32],
]


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize(
    "frame", ["{}", "see {} here", '"{}"', "\\n{}\\n", "({}),", "x={}", "https://{}@github.com/o/r"]
)
def test_tokens_are_known_by_their_shape(token: str, frame: str) -> None:
    cleaned = REDACTOR.text(frame.format(token))
    assert token not in cleaned
    assert token[-8:] not in cleaned
    assert "<redacted>" in cleaned


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # environment dumps as published traces carry them
        (
            '"env": {"HF_TOKEN": "redacted", "HOSTNAME": "host0001"}',
            '"env": {"HF_TOKEN": "<redacted>", "HOSTNAME": "<host>"}',
        ),
        (
            '{\\"HF_TOKEN\\": \\"hf_xxxx\\", \\"HOSTNAME\\": \\"host0001\\"}',
            '{\\"HF_TOKEN\\": \\"<redacted>\\", \\"HOSTNAME\\": \\"<host>\\"}',
        ),
        ("HF_TOKEN: hf_xxxx...", "HF_TOKEN: <redacted>"),
        ("export WANDB_API_KEY=" + HEX40, "export WANDB_API_KEY=<redacted>"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AWS_SECRET_ACCESS_KEY=<redacted>"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "aws_secret_access_key = <redacted>"),
        ("MLFLOW_TRACKING_TOKEN=abcdefgh", "MLFLOW_TRACKING_TOKEN=<redacted>"),
        ("MLFLOW_TRACKING_TOKEN: abcdefgh", "MLFLOW_TRACKING_TOKEN: <redacted>"),
        ("AccountName=x;AccountKey=abcd1234==;Suffix=y", "AccountName=x;AccountKey=<redacted>;Suffix=y"),
        (
            "USER=bob LOGNAME=bob HOSTNAME=gn07 SLURMD_NODENAME=gn07",
            "USER=<user> LOGNAME=<user> HOSTNAME=<host> SLURMD_NODENAME=<host>",
        ),
        (
            'modelName="NVIDIA L4",Hostname="host0002",DCGM_FI_DRIVER_VERSION="580.105.08"} 210',
            'modelName="NVIDIA L4",Hostname="<host>",DCGM_FI_DRIVER_VERSION="580.105.08"} 210',
        ),
        (
            '"hostname":"host0001.example.invalid","release":"5.15.0-160-generic"',
            '"hostname":"<host>","release":"5.15.0-160-generic"',
        ),
        # assignments in programs, URLs and command lines
        ("password=hunter2", "password=<redacted>"),
        ("connect(password='hunter2', user=u)", "connect(password='<redacted>', user=u)"),
        ('secret="s3cr3t"', 'secret="<redacted>"'),
        ("client_secret: abcDEF99", "client_secret: <redacted>"),
        ("token=abc123", "token=<redacted>"),
        ("api_key='x'", "api_key='<redacted>'"),
        ("apiKey: 'k9'", "apiKey: '<redacted>'"),
        ("GET /v1?key=abc123&token=xyz987&n=5", "GET /v1?key=<redacted>&token=<redacted>&n=5"),
        (
            "train.py --hf-token abcdef --password hunter2 --lr 3e-4",
            "train.py --hf-token <redacted> --password <redacted> --lr 3e-4",
        ),
        ("https://x.org/v1?token=abcdef&key=q", "https://x.org/v1?token=<redacted>&key=<redacted>"),
        ("token=supersecretvalue", "token=<redacted>"),
        ("--token=abc12345", "--token=<redacted>"),
        ("X-Api-Key: 12ab34cd", "X-Api-Key: <redacted>"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer <redacted>"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: Basic <redacted>"),
        ("wandb login " + HEX40, "wandb login <redacted>"),
        ("machine api.wandb.ai login user password " + HEX40, "machine api.wandb.ai login user password <redacted>"),
        ("https://bob:s3cr3t@git.example.com/x.git", "https://<redacted>@git.example.com/x.git"),
        ("postgres://u:pa#ss@db/x", "postgres://<redacted>@db/x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow==\n-----END RSA PRIVATE KEY-----\nrest", "<redacted>\nrest"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk", "<redacted>"),
        # paths
        (
            "/home/u01xx/anaconda3/envs/kineto/lib/python3.7/queues.py(113): get",
            "~/anaconda3/envs/kineto/lib/python3.7/queues.py(113): get",
        ),
        ("/home/user@example.invalid/TraceLens-internal", "~/TraceLens-internal"),
        (
            "/data/users/u07xx/a/pytorch/torch/nn/attention/flex_attention.py:1286",
            "~/a/pytorch/torch/nn/attention/flex_attention.py:1286",
        ),
        ("/Users/bob/x.py /root/.cache /root", "~/x.py ~/.cache ~"),
        ("-I/home/bob/include PATH=/home/a/bin:/home/b.c/bin", "-I~/include PATH=~/bin:~/bin"),
        (r"C:\Users\John Smith\x.py C:\\Users\\bob\\y D:/Users/bob/z", r"~\x.py ~\\y ~/z"),
        ("/data/alice/run and file:///home/bob/x", "~/run and file://~/x"),
        # addresses
        (
            "10.0.0.1 192.168.1.20:29500 172.16.3.4/24 169.254.1.1 100.64.3.2",
            "<address> <address>:29500 <address>/24 <address> <address>",
        ),
        ("fe80::1ff:fe23:4567:890a%eth0 fd12:3456:789a::1", "<address> <address>"),
        ("ec:0d:9a:03:ff:12 00-1A-2B-3C-4D-5E", "<mac> <mac>"),
        ("Bob <bob.b+x@mail.example.com>", "Bob <<email>>"),
        ("ip-10-0-12-7.ec2.internal", "<host>"),
        # names
        ("alice's run, alice_x malice /scratch/alice/x", "<user>'s run, alice_x malice /scratch/<user>/x"),
        ("trainbox7 TRAINBOX7.corp.example trainbox71", "<host> <host> trainbox71"),
        ("moonshot-v2", "<redacted>-v2"),
        (r"\nalice\n/home/bob/x\n10.0.0.4", r"\n<user>\n~/x\n<address>"),
    ],
)
def test_what_is_replaced(text: str, expected: str) -> None:
    assert REDACTOR.text(text) == expected
    assert REDACTOR.text(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[8, 16, 2048] [[64, 3, 7, 7], []] float32[2048, 50257]",
        "torch 2.13.0+cpu, CUDA 12.8.0.1, driver 580.105.08, Python 3.11.7",
        'nvidia-curand-cu12==10.3.5.147 "version": "10.3.5.147" lib.so.10.3.5.147 nvidia_curand_cu12-10.3.5.147-py3',
        "nvidia-curand-cu12       10.3.5.147",
        "127.0.0.1:29500 0.0.0.0 8.8.8.8 172.32.0.1 localhost ::1",
        "commit 041e7ce99f3b2a1c0d9e8f7a6b5c4d3e2f1a0b9c and " + HEX40,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_320x128_64x3_2x1_v_bz_coopB_TNT void at::native::vectorized_elementwise_kernel<4, at::native::add>",
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE",
        "GPU-00000000-0000-0000-0000-000000000008 pci 00000000:31:00.0 at 12:30:45",
        "y = F.scaled_dot_product_attention(query, key=k, value=v, attn_mask=None)",
        "self.key = nn.Linear(d, d); key = self.key(x).view(b, t, h, -1); k = key.transpose(1, 2)",
        "q@k.transpose(-2, -1) + q@k.mT + x@w.to(y.dtype)",
        "sorted(items, key=lambda kv: kv[1]); max(d, key=d.get); d.sort(key=len)",
        'key="transformer.h.0.attn.weight"; key = "layers.12"; key: Tensor; key: torch.float32; sort_key = "step3"',
        "tokens_per_step=16384 max_new_tokens=128 num_key_value_heads=8 key_padding_mask=None pad_token_id=50256",
        'pad_token="<pad>" cls_token = nn.Parameter(torch.zeros(1, 1, d)) next_token = torch.multinomial(p, 1)',
        'token=os.environ["HF_TOKEN"] token=args.hf_token token=True api_key=get_key() password: str = None',
        'parser.add_argument("--token", default=None); getpass("password: "); ENV = "GITHUB_TOKEN"',
        'SHAPE_KEY = "shape"; IMAGE_TOKEN_INDEX = -200; TOKENIZERS_PARALLELISM=false; cache_key=f3a9c1b2',
        "PWD=/workspace/x USER=root git@github.com:org/repo.git https://host:8080/x http://localhost:29500/",
        "hf_hub_download hf_transfer hf_quantizer task-based-sk-learn-classifier disk-space desk-top",
        "@torch.compile(mode='max-autotune') def f(x: Tensor) -> Tensor: ...",
        "--master-port 29500 --tokenizer gpt2 --max-tokens 128 --key-dim 64",
        "model/root/layer tree/home/page usr/home s3://bucket/home/x /homepage /rooted",
        "the bearer token scheme, bearer authentication, a secret of success",
        "lr=3e-4 betas=(0.9, 0.95) seed=1337 <unk> <s> ~0.5 a<b>c",
    ],
)
def test_what_stays_as_it_is(text: str) -> None:
    assert REDACTOR.text(text) == text


@pytest.mark.parametrize("name", ["root", "user", "localhost", "al", "adam", "12345", ""])
def test_short_and_common_names_are_no_secrets(name: str) -> None:
    text = f"{name} torch.optim.{name} at {name}"
    assert Redactor(user=name, host=name).text(text) == text


def test_extra_literals_cannot_break_the_placeholders() -> None:
    redactor = Redactor(extra=("redacted", "user", "acme"), user="redacted")
    assert redactor.text("acme user token=abc123") == "<redacted> user token=<redacted>"


FRAGMENTS = [
    *TOKENS[:4],
    "/home/",
    "alice",
    "/root",
    "~",
    "C:\\Users\\",
    "10.0.0.1",
    "fe80::1",
    "ec:0d:9a:03:ff:12",
    "bob@x.com",
    "token",
    "password",
    "key",
    "secret",
    "HOSTNAME",
    "=",
    ": ",
    '"',
    "'",
    "\\",
    "\\n",
    "\n",
    "/",
    "@",
    "://",
    "--",
    "Bearer ",
    "sk-",
    "eyJ",
    ".",
    "-",
    "_",
    "x",
    "7",
    "<",
    ">",
    "<redacted>",
    "<host>",
    "trainbox7",
    "moonshot",
    "(",
    ")",
    "[",
    " ",
    "-----BEGIN PRIVATE KEY-----",
    "wandb login ",
    HEX40,
]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join))
def test_applying_it_twice_changes_nothing_more(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from(TOKENS), st.text())
def test_a_token_between_blanks_never_survives(before: str, token: str, after: str) -> None:
    assert token not in REDACTOR.text(f"{before} {token} {after}")


@pytest.mark.parametrize(
    "unit",
    """a 1 / a. a@ a@b. eyJ eyJaaaaaaaa. token= token=' token=\\" api_key KEY_ :// ://a@ -----BEGIN%PRIVATE%KEY-----
    -----BEGIN%PRIVATE%KEY-----a- wandb%login% login%a%password% fe80:: 10.0.0. /home/ /mnt/a C:\\Users\\a% sk- 00:
    Bearer%a \\n <redacted> --token%a% xoxb- HOSTNAME=a""".split(),
)
def test_text_made_to_hurt_takes_time_in_proportion(unit: str) -> None:
    """Four times the text: linear work takes 4 times as long, quadratic work 16 times."""
    unit = unit.replace("%", " ")

    def seconds(length: int) -> float:
        text = (unit * (length // len(unit) + 1))[:length] + "!@x.com token= :// /home"
        begin = time.process_time()
        REDACTOR.text(text)
        return time.process_time() - begin

    assert seconds(1_000_000) < 10 * seconds(250_000) + 0.2


class Colour(str, enum.Enum):
    RED = "alice"


class Pair(NamedTuple):
    token: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    path: str
    tags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    step: int | None = None


def test_values_keep_their_types() -> None:
    value = {
        "path": "/home/bob/x",
        "items": ["alice", ("10.0.0.1", 3, None, 2.5, True)],
        "nested": {"/home/bob/y": "z"},
        "colour": Colour.RED,
        "safety": Safety.EXACT,
        "record": Record(path="/root/x", tags=("alice",), settings={"a": "bob@x.com"}, step=3),
        "file": PurePosixPath("/home/bob/x").parts,
    }
    cleaned = REDACTOR.value(value)
    assert cleaned["path"] == "~/x"
    assert cleaned["items"] == ["<user>", ("<address>", 3, None, 2.5, True)]
    assert cleaned["nested"] == {"~/y": "z"}
    assert cleaned["colour"] is Colour.RED
    assert cleaned["safety"] is Safety.EXACT
    assert cleaned["record"] == Record(path="~/x", tags=("<user>",), settings={"a": "<email>"}, step=3)
    assert value["path"] == "/home/bob/x"


def test_values_under_a_secret_name_go_whatever_they_look_like() -> None:
    value = {
        "HF_TOKEN": "redacted",
        "HOSTNAME": "host0001",
        "USER": "bob",
        "db_password": "x y",
        "key": "attn",
        "steps": "8",
    }
    assert REDACTOR.value(value) == {
        "HF_TOKEN": "<redacted>",
        "HOSTNAME": "<host>",
        "USER": "<user>",
        "db_password": "<redacted>",
        "key": "attn",
        "steps": "8",
    }
    assert REDACTOR.value(("train.py", "--hf-token", "abc", "--lr", "3e-4")) == (
        "train.py",
        "--hf-token",
        "<redacted>",
        "--lr",
        "3e-4",
    )
    assert REDACTOR.value(Pair("abcdefgh", 2)) == Pair("<redacted>", 2)


def test_the_checksum_of_a_file_is_no_secret_whatever_the_file_is_called() -> None:
    value = {"train_token_mean.py": "d305f6920c845602618d7bf104531d33294889fe27cad4c7463f6cbd69e0da1d"}
    assert REDACTOR.value(value) == value


def test_mappings_of_other_kinds_and_colliding_keys() -> None:
    assert REDACTOR.value({"/home/a": 1, "/home/b": 2}) == {"~": 1, "~ (2)": 2}
    ordered = REDACTOR.value(OrderedDict(a="alice"))
    assert type(ordered) is OrderedDict
    assert ordered == {"a": "<user>"}
    proxy = REDACTOR.value(MappingProxyType({"a": "alice"}))
    assert type(proxy) is MappingProxyType
    assert proxy["a"] == "<user>"


def test_the_nouns_of_a_report() -> None:
    environment = Environment(
        python="3.11.7",
        torch="2.13.0",
        command=("/home/bob/train.py", "--api-key", "xyz"),
        variables=MappingProxyType({"TORCH_LOGS_OUT": "/home/bob/logs"}),
    )
    cleaned = REDACTOR.value(environment)
    assert cleaned.command == ("~/train.py", "--api-key", "<redacted>")
    assert cleaned.variables == {"TORCH_LOGS_OUT": "~/logs"}
    assert cleaned.torch == "2.13.0"
    evidence = (Evidence(what="a", value=1.0, unit="us"),)
    assert REDACTOR.value(evidence) == evidence


def test_the_machine_describes_itself() -> None:
    redactor = Redactor.of_machine(extra=("moonshot",))
    assert redactor.text(os.path.expanduser("~/x moonshot")) == "~/x <redacted>"


def test_only_listed_variables_are_recorded() -> None:
    environ = {
        "OMP_NUM_THREADS": "8",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_LOGS": "/home/bob/logs",
        "NVIDIA_TF32_OVERRIDE": "0",
        "WORLD_SIZE": "2",
        "NCCL_P2P_DISABLE": "1",
        "HF_TOKEN": "hf_x",
        "PATH": "/usr/bin",
        "HOME": "/home/bob",
        "MASTER_ADDR": "10.0.0.1",
    }
    recorded = environment_allow_list(environ)
    assert list(recorded) == sorted(recorded)
    assert recorded.keys() == environ.keys() - {"HF_TOKEN", "PATH", "HOME", "MASTER_ADDR"}
    assert recorded["TORCH_LOGS"] == "~/logs"
