"""Runs some sixty operators on a GPU, each between profiler marks, so that two profilers see the same kernels.

python record_operators.py --trace trace.json.gz          # torch.profiler
ncu --csv --page raw --clock-control none --profile-from-start off --set basic ... python record_operators.py
"""

import argparse

import torch
import torch.nn.functional as F


def calls():
    """Name and closure of every operator, forward and backward, in several dtypes."""
    torch.manual_seed(0)
    device = "cuda"

    def tensor(*shape, dtype=torch.bfloat16, grad=False):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    def backward(output):
        gradient = torch.randn_like(output)
        return lambda: torch.autograd.grad(output, inputs_of[output], gradient, retain_graph=True)

    inputs_of = {}
    for dtype in (torch.bfloat16, torch.float32):
        short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        a, b = tensor(4096, 2048, dtype=dtype), tensor(2048, 8192, dtype=dtype)
        odd = tensor(2048, 5025, dtype=dtype)
        yield f"mm {short}", lambda a=a, b=b: a @ b
        yield f"mm odd {short}", lambda a=a, odd=odd: a @ odd
        yield f"mm t {short}", lambda a=a, b=b: b.t() @ a.t()
        bias = tensor(8192, dtype=dtype)
        yield f"addmm {short}", lambda a=a, b=b, bias=bias: torch.addmm(bias, a, b)
        x, y = tensor(64, 1024, 128, dtype=dtype), tensor(64, 128, 1024, dtype=dtype)
        yield f"bmm {short}", lambda x=x, y=y: torch.bmm(x, y)
        for causal in (False, True):
            q, k, v = (tensor(4, 16, 1024, 64, dtype=dtype, grad=True) for _ in range(3))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            inputs_of[out] = (q, k, v)
            yield (
                f"sdpa {causal} {short}",
                lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
            )
            yield f"sdpa backward {causal} {short}", backward(out)
        h = tensor(4096, 2048, dtype=dtype, grad=True)
        weight, shift = tensor(2048, dtype=dtype, grad=True), tensor(2048, dtype=dtype, grad=True)
        for name, run in {
            "layer_norm": lambda h, weight=weight, shift=shift: F.layer_norm(h, (2048,), weight, shift),
            "rms_norm": lambda h, weight=weight: F.rms_norm(h, (2048,), weight),
            "gelu": F.gelu,
            "silu": F.silu,
            "softmax": lambda h: h.softmax(-1),
            "log_softmax": lambda h: h.log_softmax(-1),
            "dropout": lambda h: F.dropout(h, 0.1),
            "sum": lambda h: h.sum(0),
            "mean": lambda h: h.mean(-1, keepdim=True),
            "pow": lambda h: h**3,
            "add": lambda h: h + h,
            "broadcast": lambda h: h * h[:, :1],
            "transposed copy": lambda h: h.t().contiguous(),
        }.items():
            out = run(h)
            inputs_of[out] = (h,)
            yield f"{name} {short}", lambda run=run, h=h: run(h)
            yield f"{name} backward {short}", backward(out)
        image = tensor(32, 64, 56, 56, dtype=dtype, grad=True)
        filters = tensor(128, 64, 3, 3, dtype=dtype, grad=True)
        out = F.conv2d(image, filters, padding=1)
        inputs_of[out] = (image, filters)
        yield f"conv2d {short}", lambda image=image, filters=filters: F.conv2d(image, filters, padding=1)
        yield f"conv2d backward {short}", backward(out)
        yield f"max_pool2d {short}", lambda image=image: F.max_pool2d(image, 2)
        norm = torch.nn.BatchNorm2d(64, device=device, dtype=dtype)
        yield f"batch_norm {short}", lambda norm=norm, image=image: norm(image)
        table = tensor(50304, 1024, dtype=dtype)
        index = torch.randint(0, 50304, (8192,), device=device)
        yield f"embedding {short}", lambda table=table, index=index: F.embedding(index, table)
        logits, target = tensor(2048, 50257, dtype=dtype), torch.randint(0, 50257, (2048,), device=device)
        yield f"cross_entropy {short}", lambda logits=logits, target=target: F.cross_entropy(logits, target)
        yield f"cat {short}", lambda a=a: torch.cat([a, a], 1)
        yield f"topk {short}", lambda a=a: a.topk(8)
        yield f"cumsum {short}", lambda a=a: a.cumsum(0)
    yield "cast", lambda h=h: h.to(torch.bfloat16)
    parameters = [torch.nn.Parameter(tensor(1024, 1024, dtype=torch.float32)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for fused, foreach in ((True, False), (False, True)):
        optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=foreach)
        yield f"adamw fused={fused}", optimizer.step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace")
    arguments = parser.parse_args()
    found = list(calls())
    for _, run in found:  # warm up: libraries choose and compile their kernels
        run()
    torch.cuda.synchronize()
    if arguments.trace:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
            for name, run in found:
                with torch.profiler.record_function(name):
                    run()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(arguments.trace)
        return
    torch.cuda.profiler.start()
    for _, run in found:
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
