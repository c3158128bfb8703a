"""What operators with a fixed pattern of inputs and outputs read and write, as a table by argument name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from advisor.operators.calls import Call, NotRecorded


class Moves(NamedTuple):
    """Arguments read once, and those whose shape and dtype the results have, written once.

    Where `mask` names an argument, each of `writes` is written only if its flag is set; none where it was not recorded.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    mask: str | None = None

    def traffic(self, call: Call) -> int:
        """Bytes of a call; raises NotRecorded where one of the shapes or dtypes is not known."""
        if not call.given((*self.reads, *self.writes)[0]):
            raise NotRecorded(call.name)
        total = sum(call.traffic(name) for name in self.reads)
        flags = (True,) * len(self.writes)
        if self.mask is not None:
            try:
                flags = call.flags(self.mask)
            except NotRecorded:
                return total
        return total + sum(call.written(name) for name, flag in zip(self.writes, flags, strict=False) if flag)


# operator | read | written | flags that choose what is written
#
# Left out, so that the sum stays a lower bound: statistics and reductions a kernel may keep on the chip (mean, rstd,
# log-sum-exp), running averages, gradients that a child operator fills (`zero_`, which is a row of its own), and
# arguments that the schema passes but the arithmetic does not need.
_TABLE = """
native_layer_norm | input weight bias | input
native_layer_norm_backward | grad_out input mean rstd weight | input weight bias | output_mask
_fused_rms_norm | input weight | input
_fused_rms_norm_backward | grad_out input rstd weight | input weight | output_mask
native_group_norm | input weight bias | input
native_group_norm_backward | grad_out input mean rstd weight | input weight weight | output_mask
native_batch_norm | input weight bias | input
native_batch_norm_backward | grad_out input weight save_mean save_invstd | input weight weight | output_mask
cudnn_batch_norm | input weight bias | input
cudnn_batch_norm_backward | input grad_output weight save_mean save_var | input weight weight
miopen_batch_norm | input weight bias | input
miopen_batch_norm_backward | input grad_output weight save_mean save_var | input weight weight
batch_norm_stats | input |
batch_norm_elemt | input weight bias mean invstd | input
batch_norm_backward_reduce | grad_out input mean invstd |
batch_norm_backward_elemt | grad_out input mean invstd weight sum_dy sum_dy_xmu | input
nll_loss_forward | target |
nll_loss_backward | target |
nll_loss2d_forward | target |
nll_loss2d_backward | target |
mse_loss_backward | grad_output self target | self
smooth_l1_loss_backward | grad_output self target | self
huber_loss_backward | grad_output self target | self
binary_cross_entropy_backward | grad_output self target weight | self
embedding_dense_backward | grad_output indices |
scatter_ | index |
scatter_add_ | index |
index_add_ | index source |
index_copy_ | index source |
index_put_ | values |
_index_put_impl_ | values |
masked_select | mask |
nonzero | self |
masked_fill | mask | self
masked_fill_ | mask |
copy_ | src | self
clone | self | self
contiguous | self | self
fill_ | | self
zero_ | | self
uniform_ | | self
normal_ | | self
exponential_ | | self
bernoulli_ | | self
bernoulli | self | self
random_ | | self
cumsum | self | self
cumprod | self | self
logcumsumexp | self | self
cat | tensors | tensors
_cat | tensors | tensors
stack | tensors | tensors
tril | | self
triu | | self
avg_pool2d_backward | grad_output | self
max_pool2d_with_indices_backward | grad_output indices |
_fused_adam_ | self grads exp_avgs exp_avg_sqs max_exp_avg_sqs | self exp_avgs exp_avg_sqs max_exp_avg_sqs
_fused_adamw_ | self grads exp_avgs exp_avg_sqs max_exp_avg_sqs | self exp_avgs exp_avg_sqs max_exp_avg_sqs
_fused_adagrad_ | self grads state_sums | self state_sums
_foreach_norm | self |
_foreach_zero_ | | self
_foreach_copy_ | src | self
_amp_foreach_non_finite_check_and_unscale_ | self | self
"""


def _parse(text: str) -> dict[str, Moves]:
    found = {}
    for line in text.strip().splitlines():
        name, reads, writes, *mask = (part.strip() for part in line.split("|"))
        found[f"aten::{name}"] = Moves(tuple(reads.split()), tuple(writes.split()), mask[0] if mask else None)
    return found


MOVES: Mapping[str, Moves] = _parse(_TABLE)
