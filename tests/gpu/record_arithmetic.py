"""Records what a GPU runs of the operators whose arithmetic is counted, beside torch's own count of each call.

python record_arithmetic.py OUT    # writes OUT/trace.json.gz and OUT/counted.json: a call's name -> torch's count
"""

import gzip
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def tensor(*shape, dtype=torch.bfloat16, grad=False):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def through(run, *inputs):
    """Forward and backward of a function of tensors that need gradients."""

    def call():
        output = run(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        for x in inputs:
            x.grad = None
        output.backward(torch.ones_like(output))

    return call


def products():
    a, b = tensor(2048, 1024), tensor(1024, 4096)
    yield "mm", lambda: a @ b
    yield "mm out", partial(torch.mm, a, b, out=tensor(2048, 4096))
    yield "addmm beta 0", partial(torch.addmm, tensor(2048, 4096), a, b, beta=0)
    yield "addmm_", partial(tensor(2048, 4096).addmm_, a, b)
    x, y = tensor(16, 512, 256), tensor(16, 256, 512)
    yield "bmm", lambda: torch.bmm(x, y)
    yield "baddbmm", partial(torch.baddbmm, tensor(16, 512, 512), x, y)
    yield "addbmm", partial(torch.addbmm, tensor(512, 512), x, y)
    yield "mv", partial(torch.matmul, a, tensor(1024))
    yield "dot", partial(torch.dot, tensor(1 << 20), tensor(1 << 20))
    yield "linear", partial(F.linear, a, tensor(4096, 1024), tensor(4096))
    yield "einsum", partial(torch.einsum, "bqhd,bkhd->bhqk", tensor(4, 512, 8, 64), tensor(4, 512, 8, 64))
    e4 = torch.float8_e4m3fn
    p, q, one = a.to(e4), b.t().contiguous().to(e4).t(), torch.ones((), device="cuda")
    yield "scaled_mm", lambda: torch._scaled_mm(p, q, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    i8 = torch.randint(-8, 8, (1024, 1024), device="cuda", dtype=torch.int8)
    yield "int_mm", lambda: torch._int_mm(i8, i8)


def grouped():
    ends = torch.tensor([256, 1024, 1536, 2048], device="cuda", dtype=torch.int32)
    yield "grouped 2d 3d", partial(torch._grouped_mm, tensor(2048, 512), tensor(4, 512, 1024), offs=ends)
    yield "grouped 3d 2d", partial(torch._grouped_mm, tensor(4, 1024, 512), tensor(512, 2048), offs=ends)
    yield "grouped 2d 2d", partial(torch._grouped_mm, tensor(1024, 2048), tensor(2048, 512), offs=ends)
    yield "grouped 3d 3d", partial(torch._grouped_mm, tensor(4, 1024, 512), tensor(4, 512, 1024))


def convolutions():
    def case(layer, *size):
        layer = layer.cuda().bfloat16()
        return through(lambda x, *_: layer(x), tensor(*size, grad=True), *layer.parameters())

    image = (16, 64, 56, 56)
    yield "conv1d", case(nn.Conv1d(64, 128, 5, stride=2, padding=2), 8, 64, 4096)
    yield "conv2d", case(nn.Conv2d(64, 64, 3, padding=1), *image)
    yield "conv2d 1x1 stride 2", case(nn.Conv2d(64, 512, 1, stride=2), *image)
    yield "conv2d dilated", case(nn.Conv2d(64, 64, 3, dilation=2), *image)
    yield "conv2d groups", case(nn.Conv2d(64, 64, 3, groups=4), *image)
    yield "depthwise", case(nn.Conv2d(64, 64, 7, padding=3, groups=64), *image)
    yield "conv3d", case(nn.Conv3d(16, 32, 3, padding=1), 4, 16, 16, 32, 32)
    yield "transposed", case(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), 8, 64, 28, 28)


def attentions():
    def sdpa(backend, keys=1024, heads=16, dtype=torch.bfloat16, mask=None, **options):
        q = tensor(4, 16, 1024, 64, dtype=dtype, grad=True)
        k, v = (tensor(4, heads, keys, 64, dtype=dtype, grad=True) for _ in range(2))

        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

        return through(run, q, k, v)

    flash, efficient, cudnn, maths = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    )
    for name, backend in (("flash", flash), ("efficient", efficient), ("cudnn", cudnn), ("math", maths)):
        yield name, sdpa(backend)
        yield f"{name} causal", sdpa(backend, is_causal=True)
        yield f"{name} cross", sdpa(backend, keys=512)
    yield "flash grouped queries", sdpa(flash, heads=4, enable_gqa=True)
    yield "efficient mask", sdpa(efficient, mask=tensor(1, 1, 1024, 1024).expand(4, 16, -1, -1))
    yield "efficient causal cross", sdpa(efficient, keys=2048, is_causal=True)
    yield "efficient fp32", sdpa(efficient, dtype=torch.float32)


def packed():
    from torch.nn.attention.varlen import varlen_attn

    def case(lengths):
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
        q, k, v = (tensor(sum(lengths), 16, 64, grad=True) for _ in range(3))
        return through(lambda q, k, v: varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths)), q, k, v)

    yield "packed equal", case([512] * 4)
    yield "packed unequal", case([128, 512, 1024])


def recurrent():
    for name, layer, options in (
        ("lstm", nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        ("lstm projected", nn.LSTM, {"proj_size": 64, "batch_first": True}),
        ("gru", nn.GRU, {}),
        ("rnn", nn.RNN, {"num_layers": 3}),
    ):
        layer = layer(128, 256, **options).cuda().bfloat16()
        x = tensor(64, 32, 128, grad=True)
        yield name, through(lambda x, *_, layer=layer: layer(x), x, *layer.parameters())


def moves():
    rows = torch.randint(0, 50304, (16, 1024), device="cuda")
    table = tensor(50304, 1024, grad=True)
    yield "embedding", through(lambda table: F.embedding(rows, table), table)
    image = tensor(32, 64, 112, 112, grad=True)
    yield "max_pool", through(lambda x: F.max_pool2d(x, 3, 2, 1), image)
    yield "avg_pool", through(lambda x: F.avg_pool2d(x, 2), image)
    yield "upsample", through(lambda x: F.interpolate(x, scale_factor=2), image)
    x, y = tensor(8192, 8192), tensor(8192, 8192)
    line = torch.randint(0, 8192, (4096,), device="cuda")
    yield "index_select", lambda: x.index_select(0, line)
    yield "index", lambda: x[line]
    yield "scatter_add", partial(x.scatter_add, 0, torch.randint(0, 8192, (8192, 8192), device="cuda"), y)
    yield "index_add", lambda: x.index_add(0, line, y[:4096])
    yield "masked_fill", partial(x.masked_fill, x > 0, 0.0)
    yield "where", partial(torch.where, x > 0, x, y)
    yield "compare", lambda: x > y
    yield "convert", lambda: x.float()
    yield "transpose", lambda: x.t().contiguous()
    yield "expanded", lambda: x + y[:1].expand(8192, -1)
    yield "square sum", lambda: (x * x).sum(-1)
    yield "cat", lambda: torch.cat([x, y])
    yield "topk", lambda: x.topk(8)
    yield "sort", lambda: x.sort()
    yield "cross_entropy", through(lambda z: F.cross_entropy(z, rows[0]), tensor(1024, 50304, grad=True))
    yield "mse", through(lambda z: F.mse_loss(z, y), tensor(8192, 8192, grad=True))
    yield "batch_norm", through(nn.BatchNorm2d(64).cuda(), image)
    yield "group_norm", through(nn.GroupNorm(8, 64).cuda().bfloat16(), image)
    yield "layer_norm", through(nn.LayerNorm(8192).cuda().bfloat16(), tensor(8192, 8192, grad=True))
    yield "rms_norm", through(nn.RMSNorm(8192).cuda().bfloat16(), tensor(8192, 8192, grad=True))
    yield "dropout", through(lambda z: F.dropout(z, 0.1), tensor(8192, 8192, grad=True))
    yield "softmax", through(lambda z: z.softmax(-1, dtype=torch.float32), tensor(8192, 8192, grad=True))
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        parameters = [nn.Parameter(tensor(4096, 4096, dtype=torch.float32)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        yield f"{kind.__name__} fused", kind(parameters, fused=True, **more).step
        yield f"{kind.__name__} foreach", kind(parameters, foreach=True, **more).step
    chain = torch.compile(lambda x, y: F.gelu(x * y + 1).sum(-1))
    yield "compiled", lambda: chain(x, y)


def main():
    out = Path(sys.argv[1])
    counted, failed = {}, {}
    ready = []
    for group in (products, grouped, convolutions, attentions, packed, recurrent, moves):
        iterator = group()
        while True:
            try:
                name, call = next(iterator)
            except StopIteration:
                break
            try:
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
            except (RuntimeError, TypeError) as error:  # a backend that this build lacks
                failed[name] = repr(error)[:300]
                continue
            ready.append((name, call))
            try:
                with FlopCounterMode(display=False) as counter:
                    call()
                counted[name] = counter.get_total_flops()
            except AssertionError as error:  # shapes that torch's counter does not know
                failed[name] = repr(error)[:300]
    flush = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for name, call in ready:
            flush.zero_()
            with torch.profiler.record_function(f"call {name}"):
                call()
            torch.cuda.synchronize()
    trace = out / "trace.json"
    profiler.export_chrome_trace(str(trace))
    with gzip.open(out / "trace.json.gz", "wb", 9) as packed_trace:
        packed_trace.write(trace.read_bytes())
    trace.unlink()
    (out / "counted.json").write_text(json.dumps({"counted": counted, "failed": failed}, indent=1))
    print(json.dumps(failed, indent=1))


if __name__ == "__main__":
    main()
