"""Argument names of recorded operators in the order of their schemas, so that formulas can ask for them by name.

Names and order are torch's own (`native_functions.yaml`; a test compares them with an installed torch) and those of the
custom operators that flash-attn 2.7 (`flash_attn/flash_attn_interface.py`) and AITER (`aiter/ops/mha.py`) register. An
operator with two schemas has two lines; the number of recorded inputs tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

_SCHEMAS = """
aten::mm self mat2
aten::bmm self mat2
aten::addmm self mat1 mat2 beta alpha
aten::_addmm_activation self mat1 mat2 beta alpha use_gelu
aten::addbmm self batch1 batch2 beta alpha
aten::baddbmm self batch1 batch2 beta alpha
aten::_int_mm self mat2
aten::_scaled_mm self mat2 scale_a scale_b bias scale_result out_dtype use_fast_accum
aten::_grouped_mm self mat2 offs bias out_dtype
aten::_scaled_grouped_mm self mat2 scale_a scale_b offs bias scale_result out_dtype use_fast_accum
aten::mv self vec
aten::addmv self mat vec beta alpha
aten::dot self tensor
aten::vdot self other
aten::linear input weight bias
aten::matmul self other
aten::convolution input weight bias stride padding dilation transposed output_padding groups
aten::convolution_overrideable input weight bias stride padding dilation transposed output_padding groups
aten::_convolution input weight bias stride padding dilation transposed output_padding groups benchmark \
deterministic cudnn_enabled allow_tf32
aten::cudnn_convolution self weight padding stride dilation groups benchmark deterministic allow_tf32
aten::cudnn_convolution_transpose self weight padding output_padding stride dilation groups benchmark deterministic \
allow_tf32
aten::cudnn_convolution_relu self weight bias stride padding dilation groups
aten::cudnn_convolution_add_relu self weight z alpha bias stride padding dilation groups
aten::miopen_convolution self weight bias padding stride dilation groups benchmark deterministic
aten::miopen_convolution_transpose self weight bias padding output_padding stride dilation groups benchmark \
deterministic
aten::miopen_depthwise_convolution self weight bias padding stride dilation groups benchmark deterministic
aten::miopen_convolution_relu self weight bias stride padding dilation groups
aten::miopen_convolution_add_relu self weight z alpha bias stride padding dilation groups
aten::mkldnn_convolution self weight bias padding stride dilation groups
aten::_conv_depthwise2d self weight kernel_size bias stride padding dilation
aten::conv_depthwise3d self weight kernel_size bias stride padding dilation
aten::_slow_conv2d_forward self weight kernel_size bias stride padding
aten::slow_conv3d_forward self weight kernel_size bias stride padding
aten::slow_conv_dilated2d self weight kernel_size bias stride padding dilation
aten::slow_conv_dilated3d self weight kernel_size bias stride padding dilation
aten::cudnn_convolution_backward_input self_size grad_output weight
aten::miopen_convolution_backward_input self_size grad_output weight
aten::convolution_backward grad_output input weight bias_sizes stride padding dilation transposed output_padding \
groups output_mask
aten::convolution_backward_overrideable grad_output input weight stride padding dilation transposed output_padding \
groups output_mask
aten::_cudnn_rnn input weight weight_stride0 weight_buf hx cx mode hidden_size proj_size num_layers batch_first \
dropout train bidirectional batch_sizes dropout_state
aten::_cudnn_rnn_backward input weight weight_stride0 weight_buf hx cx output grad_output grad_hy grad_cy mode \
hidden_size proj_size num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve \
output_mask
aten::miopen_rnn input weight weight_stride0 hx cx mode hidden_size num_layers batch_first dropout train \
bidirectional batch_sizes dropout_state
aten::miopen_rnn_backward input weight weight_stride0 weight_buf hx cx output grad_output grad_hy grad_cy mode \
hidden_size num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve output_mask
aten::mkldnn_rnn_layer input weight0 weight1 weight2 weight3 hx_ cx_ reverse batch_sizes mode hidden_size \
num_layers has_biases bidirectional batch_first train
aten::mkldnn_rnn_layer_backward input weight1 weight2 weight3 weight4 hx_ cx_tmp output hy_ cy_ grad_output grad_hy \
grad_cy reverse mode hidden_size num_layers has_biases train bidirectional batch_sizes batch_first workspace
aten::scaled_dot_product_attention query key value attn_mask dropout_p is_causal scale enable_gqa
aten::_scaled_dot_product_flash_attention query key value dropout_p is_causal return_debug_mask scale
aten::_scaled_dot_product_flash_attention query key value q_descale k_descale v_descale dropout_p is_causal \
return_debug_mask scale
aten::_scaled_dot_product_flash_attention_for_cpu query key value dropout_p is_causal attn_mask scale
aten::_scaled_dot_product_efficient_attention query key value attn_bias compute_log_sumexp dropout_p is_causal \
scale
aten::_scaled_dot_product_cudnn_attention query key value attn_bias compute_log_sumexp dropout_p is_causal \
return_debug_mask scale
aten::_scaled_dot_product_fused_attention_overrideable query key value attn_bias dropout_p is_causal \
return_debug_mask scale
aten::_scaled_dot_product_flash_attention_backward grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q \
max_k dropout_p is_causal philox_seed philox_offset scale
aten::_scaled_dot_product_flash_attention_for_cpu_backward grad_out query key value out logsumexp dropout_p \
is_causal attn_mask scale
aten::_scaled_dot_product_efficient_attention_backward grad_out_ query key value attn_bias out logsumexp \
philox_seed philox_offset dropout_p grad_input_mask is_causal scale
aten::_scaled_dot_product_cudnn_attention_backward grad_out query key value out logsumexp philox_seed philox_offset \
attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale
aten::_scaled_dot_product_fused_attention_overrideable_backward grad_out query key value attn_bias grad_input_mask \
out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset scale
aten::_cudnn_attention_forward query key value attn_bias cum_seq_q cum_seq_k max_q max_k compute_log_sumexp \
dropout_p is_causal return_debug_mask scale
aten::_cudnn_attention_backward grad_out query key value out logsumexp philox_seed philox_offset attn_bias \
cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale
aten::_flash_attention_forward query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal \
return_debug_mask scale window_size_left window_size_right seqused_k alibi_slopes block_table num_splits
aten::_flash_attention_forward query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal \
return_debug_mask q_descale k_descale v_descale scale window_size_left window_size_right seqused_k alibi_slopes
aten::_flash_attention_backward grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p \
is_causal rng_state unused scale window_size_left window_size_right
aten::_efficient_attention_forward query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k \
dropout_p custom_mask_type compute_log_sumexp scale seqlen_k window_size
aten::_efficient_attention_backward grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q \
max_seqlen_k logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad scale num_splits_key \
window_size shared_storage_dqdkdv
flash_attn::_flash_attn_forward q k v dropout_p softmax_scale causal window_size_left window_size_right softcap \
alibi_slopes return_softmax
flash_attn::_flash_attn_varlen_forward q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p \
softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax block_table leftpad_k \
seqused_k zero_tensors
flash_attn::_flash_attn_backward dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal \
window_size_left window_size_right softcap alibi_slopes deterministic rng_state
flash_attn::_flash_attn_varlen_backward dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q \
max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic \
rng_state zero_tensors
aiter::_flash_attn_forward q k v dropout_p softmax_scale causal window_size_left window_size_right
aiter::_flash_attn_backward dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left \
window_size_right
aten::_softmax self dim half_to_float
aten::_log_softmax self dim half_to_float
aten::_softmax_backward_data grad_output output dim input_dtype
aten::_log_softmax_backward_data grad_output output dim input_dtype
aten::native_layer_norm input normalized_shape weight bias eps
aten::native_layer_norm_backward grad_out input normalized_shape mean rstd weight bias output_mask
aten::_fused_rms_norm input normalized_shape weight eps
aten::_fused_rms_norm_backward grad_out input normalized_shape rstd weight output_mask
aten::native_group_norm input weight bias N C HxW group eps
aten::native_group_norm_backward grad_out input mean rstd weight N C HxW group output_mask
aten::native_batch_norm input weight bias running_mean running_var training momentum eps
aten::native_batch_norm_backward grad_out input weight running_mean running_var save_mean save_invstd train eps \
output_mask
aten::cudnn_batch_norm input weight bias running_mean running_var training exponential_average_factor epsilon
aten::cudnn_batch_norm_backward input grad_output weight running_mean running_var save_mean save_var epsilon \
reserveSpace
aten::miopen_batch_norm input weight bias running_mean running_var training exponential_average_factor epsilon
aten::miopen_batch_norm_backward input grad_output weight running_mean running_var save_mean save_var epsilon
aten::batch_norm_stats input eps
aten::batch_norm_elemt input weight bias mean invstd eps
aten::batch_norm_backward_reduce grad_out input mean invstd weight input_g weight_g bias_g
aten::batch_norm_backward_elemt grad_out input mean invstd weight sum_dy sum_dy_xmu count
aten::native_dropout input p train
aten::_fused_dropout self p generator
aten::mse_loss self target reduction
aten::mse_loss_backward grad_output self target reduction
aten::smooth_l1_loss self target reduction beta
aten::smooth_l1_loss_backward grad_output self target reduction beta
aten::huber_loss self target reduction delta
aten::huber_loss_backward grad_output self target reduction delta
aten::binary_cross_entropy self target weight reduction
aten::binary_cross_entropy_backward grad_output self target weight reduction
aten::nll_loss_forward self target weight reduction ignore_index
aten::nll_loss_backward grad_output self target weight reduction ignore_index total_weight
aten::nll_loss2d_forward self target weight reduction ignore_index
aten::nll_loss2d_backward grad_output self target weight reduction ignore_index total_weight
aten::embedding weight indices padding_idx scale_grad_by_freq sparse
aten::embedding_dense_backward grad_output indices num_weights padding_idx scale_grad_by_freq
aten::index_select self dim index
aten::gather self dim index sparse_grad
aten::scatter_ self dim index src
aten::scatter_add_ self dim index src
aten::index_add_ self dim index source alpha
aten::index_copy_ self dim index source
aten::index_put_ self indices values accumulate
aten::_index_put_impl_ self indices values accumulate unsafe
aten::masked_select self mask
aten::nonzero self
aten::where condition self other
aten::_s_where condition self other
aten::masked_fill self mask value
aten::masked_fill_ self mask value
aten::copy_ self src non_blocking
aten::clone self memory_format
aten::contiguous self memory_format
aten::_to_copy self dtype layout device pin_memory non_blocking memory_format
aten::fill_ self value
aten::zero_ self
aten::uniform_ self from to generator
aten::normal_ self mean std generator
aten::exponential_ self lambd generator
aten::bernoulli_ self p generator
aten::bernoulli self generator
aten::random_ self generator
aten::cat tensors dim
aten::_cat tensors dim
aten::stack tensors dim
aten::cumsum self dim dtype
aten::cumprod self dim dtype
aten::logcumsumexp self dim
aten::sort self dim descending
aten::topk self k dim largest sorted
aten::max_pool2d_with_indices self kernel_size stride padding dilation ceil_mode
aten::max_pool2d_with_indices_backward grad_output self kernel_size stride padding dilation ceil_mode indices
aten::avg_pool2d self kernel_size stride padding ceil_mode count_include_pad divisor_override
aten::_adaptive_avg_pool2d self output_size
aten::adaptive_max_pool2d self output_size
aten::upsample_nearest1d self output_size scales
aten::upsample_nearest2d self output_size scales_h scales_w
aten::upsample_bilinear2d self output_size align_corners scales_h scales_w
aten::upsample_bicubic2d self output_size align_corners scales_h scales_w
aten::upsample_nearest1d_backward grad_output output_size input_size scales
aten::upsample_nearest2d_backward grad_output output_size input_size scales_h scales_w
aten::upsample_bilinear2d_backward grad_output output_size input_size align_corners scales_h scales_w
aten::upsample_bicubic2d_backward grad_output output_size input_size align_corners scales_h scales_w
aten::tril self diagonal
aten::triu self diagonal
aten::avg_pool2d_backward grad_output self kernel_size stride padding ceil_mode count_include_pad divisor_override
aten::_fused_adam_ self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps
aten::_fused_adamw_ self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps
aten::_fused_sgd_ self grads momentum_buffer_list weight_decay momentum lr dampening nesterov maximize \
is_first_step
aten::_fused_adagrad_ self grads state_sums state_steps
aten::_foreach_norm self ord dtype
aten::_foreach_zero_ self
aten::_foreach_copy_ self src non_blocking
aten::_amp_foreach_non_finite_check_and_unscale_ self found_inf inv_scale
"""


def _parse(text: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for line in text.strip().splitlines():
        name, *arguments = line.split()
        found[name] = (*found.get(name, ()), tuple(arguments))
    return found


SIGNATURES: Mapping[str, tuple[tuple[str, ...], ...]] = _parse(_SCHEMAS)


def argument_names(name: str, count: int) -> tuple[str, ...]:
    """The arguments of an operator of which `count` inputs were recorded; none for an operator that is not listed.

    Inputs beyond the last name are tensors to write to (`out=`), which no schema of a plain call has.
    """
    known = SIGNATURES.get(name) or SIGNATURES.get(name.removesuffix("_"), ())
    return next((names for names in known if len(names) == count), known[0] if known else ())
