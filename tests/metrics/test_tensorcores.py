"""What a kernel's name, operator, data type and device say about tensor cores, on names that real traces hold."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from advisor.metrics.tensorcores import MATRIX_FAMILIES, OTHER_FAMILIES, dtype_of_name, explain, tensor_use

SHARED = Path(__file__).parents[3] / "shared"
TRACES = SHARED / "corpus" / "traces"
NCU = SHARED / "h200" / "ncu_attention_raw.csv"

# Names as the traces of shared/corpus and shared/h200 record them, long ones cut after what decides; the architecture
# they ran on; whether they use tensor cores (matrix cores on AMD); the type they multiply; why.
NAMES = [
    # cuBLAS on Hopper: the profiler measured 50 % of the tensor pipe for the first two
    (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "sm_90",
        True,
        "bfloat16",
        "wgmma kernels of cuBLAS 12",
    ),
    (
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN",
        "sm_90",
        True,
        "bfloat16",
        "the same",
    ),
    (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT",
        "sm_90",
        True,
        "bfloat16",
        "with a bias",
    ),
    (
        "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT",
        "sm_90",
        True,
        "bfloat16",
        "another tile",
    ),
    # xmma: stored types, then types of the product; ffma is the vector unit
    (
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segme"
            "nt_k_off_kernel__5x_cublas"
        ),
        "sm_90",
        True,
        "bfloat16",
        "bfloat16 product",
    ),
    (
        (
            "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x32_warpgroupsize1x1x1_execute_segment_"
            "k_off_kernel__5x_cublas"
        ),
        "sm_90",
        True,
        "tfloat32",
        "float32 operands rounded to TF32",
    ),
    (
        (
            "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32_wa"
            "rpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn"
        ),
        "sm_90",
        True,
        "tfloat32",
        "a convolution in TF32, though its operator is float32",
    ),
    (
        (
            "sm90_xmma_dgrad_implicit_gemm_indexed_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize256x64x32_war"
            "pgroupsize1x1x1_g1_strided_execute_kernel__5x_cudnn"
        ),
        "sm_90",
        True,
        "tfloat32",
        "the same, to the input",
    ),
    (
        (
            "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_s"
            "tage4_warpsize2x2x1_g1_tensor16x8x8_execute_kernel_cudnn_infer"
        ),
        "sm_80",
        True,
        "tfloat32",
        "tensor16x8x8",
    ),
    (
        (
            "sm80_xmma_fprop_implicit_gemm_indexed_wo_smem_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x"
            "32x16_stage1_warpsize4x1x1_g1_tensor16x8x8_aligna4_alignc8_execute_kernel__5x_cudnn"
        ),
        "sm_90",
        True,
        "tfloat32",
        "an Ampere kernel on Hopper",
    ),
    (
        (
            "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_s"
            "tage4_warpsize2x2x1_g1_tensor16x8x8_execute_split_k_kernel_cudnn_train"
        ),
        "sm_80",
        False,
        "tfloat32",
        "sums what the execute_kernel before it left: on an H200 it spends no cycle in matrix instructions",
    ),
    (
        (
            "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsi"
            "ze1x1x1_g1_execute_segment_k_on_kernel__5x_cudnn"
        ),
        "sm_90",
        True,
        "tfloat32",
        "the product whose parts a split_k_kernel sums",
    ),
    (
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80>)",
        "sm_90",
        True,
        "float32",
        "three TF32 products: 31 % of the cycles of an H200 in matrix instructions",
    ),
    (
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_al"
            "ignc4_execute_kernel__5x_cublas"
        ),
        "sm_90",
        False,
        "float32",
        "ffma: float32 without TF32",
    ),
    (
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alig"
            "nc4_execute_split_k_kernel__5x_cublas"
        ),
        "sm_90",
        False,
        "float32",
        "ffma",
    ),
    # CUTLASS: s1688 alone is TF32, with a type before it that type
    (
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(cutlass_80_tenso"
            "rop_s1688gemm_128x128_32x3_nn_align4::Params)"
        ),
        "sm_90",
        True,
        "tfloat32",
        "tensorop, TF32",
    ),
    (
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align1>(cutlass_80_tensoro"
            "p_s1688gemm_128x64_16x6_nt_align1::Params)"
        ),
        "sm_80",
        True,
        "tfloat32",
        "an odd dimension (align1) costs time, not the tensor core",
    ),
    (
        (
            "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x256_nt_align1>(cutlass_75_"
            "tensorop_bf16_s1688gemm_bf16_128x256_nt_align1::Params)"
        ),
        "sm_90",
        True,
        "bfloat16",
        "s1688 in bfloat16: the lm head of vocabulary 50257",
    ),
    (
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(cu"
            "tlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8::Params)"
        ),
        "sm_90",
        True,
        "bfloat16",
        "tensorop",
    ),
    (
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_"
            "nhwc_align8>(cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8::Param"
            "s)"
        ),
        "sm_90",
        True,
        "bfloat16",
        "a convolution by CUTLASS",
    ),
    (
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>("
            "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8::Params)"
        ),
        "sm_90",
        True,
        "bfloat16",
        "wmma",
    ),
    (
        (
            "void cutlass::Kernel<cutlass_70_wmma_tensorop_f16_s161616gemm_f16_32x32_64x2_tn_align8>(cutl"
            "ass_70_wmma_tensorop_f16_s161616gemm_f16_32x32_64x2_tn_align8::Params)"
        ),
        "sm_80",
        True,
        "float16",
        "wmma of Volta",
    ),
    (
        (
            "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_128x128_16x4_nhw"
            "c_unity_stride_align4>"
        ),
        "sm_80",
        True,
        "tfloat32",
        "a convolution's TF32",
    ),
    (
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(cutlass_80_simt_sgemm_128"
            "x256_8x4_nt_align1::Params)"
        ),
        "sm_90",
        False,
        "float32",
        "simt",
    ),
    (
        (
            "void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x3"
            "2_8x5_nn_align1::Params)"
        ),
        "sm_80",
        False,
        "float32",
        "simt",
    ),
    (
        (
            "void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::reduction::kernel::ReduceSplitK<cutlass__5"
            "x_cudnn::MatrixShape<4, 128>, cutlass__5x_cudnn::epilogue::thread::LinearCombination<float, "
            "4, float, float"
        ),
        "sm_90",
        False,
        None,
        "adds partial results of a split product",
    ),
    # single precision of every generation
    (
        "volta_sgemm_128x64_nt",
        "sm_70",
        False,
        "float32",
        "sgemm",
    ),
    (
        "volta_sgemm_32x32_sliced1x4_tn",
        "sm_75",
        False,
        "float32",
        "sgemm",
    ),
    (
        "ampere_sgemm_32x128_tn",
        "sm_80",
        False,
        "float32",
        "sgemm is not TF32: that would be s1688",
    ),
    (
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "sm_70",
        False,
        "float32",
        "scudnn",
    ),
    (
        "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "sm_70",
        False,
        "float32",
        "scudnn",
    ),
    (
        "cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "sm_80",
        False,
        "float32",
        "scudnn",
    ),
    (
        "cudnn_turing_scudnn_128x64_stridedB_splitK_xregs_large_nn_v1",
        "sm_75",
        False,
        "float32",
        "scudnn",
    ),
    (
        ("void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int, int, int"),
        "sm_70",
        False,
        "float32",
        "sgemm",
    ),
    (
        ("void sgemm_largek_lds64<true, false, 5, 5, 4, 4, 4, 34>(float*, float const*, float const*, int, int, int"),
        "sm_70",
        False,
        "float32",
        "sgemm",
    ),
    (
        "void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>(int",
        "sm_60",
        False,
        "float32",
        "sgemm",
    ),
    (
        ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*, int"),
        "sm_70",
        False,
        "float32",
        "cuDNN's float32 engine",
    ),
    (
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*, int"),
        "sm_70",
        False,
        "float32",
        "the same",
    ),
    (
        "ampere_gcgemm_64x64_nt",
        "sm_80",
        None,
        None,
        "a complex product: on which unit the name does not say",
    ),
    (
        "volta_h16gemm_<BF16,BF16,float>_nt_v1",
        "sm_90",
        None,
        None,
        "from a synthetic trace; no such kernel is known",
    ),
    # products with a vector
    (
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_b"
            "float16, __nv_bfloat16, float, false, true, true, false, 7, false, cublasGemvParams"
        ),
        "sm_90",
        False,
        None,
        "a bfloat16 matrix times a vector stays off the tensor cores",
    ),
    (
        "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParams<",
        "sm_80",
        False,
        None,
        "gemv",
    ),
    (
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const>",
        "sm_80",
        False,
        None,
        "a dot product",
    ),
    (
        "void gemmk1_kernel<int, float, 256, 5, false, false, false, false",
        "sm_80",
        False,
        None,
        "an outer product",
    ),
    # attention
    (
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"),
        "sm_90",
        True,
        None,
        "wgmma; f16 stands for bfloat16 as well, which this was",
    ),
    (
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0"),
        "sm_90",
        True,
        None,
        "wgmma, backward",
    ),
    (
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void*, void*"),
        "sm_90",
        False,
        None,
        "launched by the same backward operator, a row sum",
    ),
    (
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int",
        "sm_90",
        False,
        None,
        "a cast",
    ),
    (
        ("flash_fwd_hdim64_bf16_sm80<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>"),
        "sm_90",
        True,
        "bfloat16",
        "FlashAttention-2",
    ),
    (
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4,"
            " false, false, cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutl"
            "ass::bfloat16_t> >, false, true"
        ),
        "sm_90",
        True,
        "bfloat16",
        "torch's FlashAttention",
    ),
    (
        ("void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>("),
        "gfx942",
        False,
        None,
        "flash in the name, a copy by nature",
    ),
    (
        "create_flashinfer_kv_indices_triton",
        "gfx942",
        False,
        None,
        "computes indices",
    ),
    (
        "attn_fwd",
        "gfx942",
        True,
        None,
        "aotriton",
    ),
    (
        "attn_fwd.kd",
        "gfx942",
        True,
        None,
        "aotriton, with the suffix of a code object",
    ),
    (
        "attn_fwd",
        "sm_90",
        None,
        None,
        "on NVIDIA anybody's kernel",
    ),
    (
        "kernel_unified_attention_2d",
        "gfx942",
        None,
        None,
        "Triton: the name does not show a dot",
    ),
    (
        (
            "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefil"
            "lPipelineQRKSVSAsyncINS_36BlockFmhaBatchPrefillPipelineProblemIDF16bDF16bDF16bffDF16bhfDF16b"
            "fDF16b"
        ),
        "gfx942",
        True,
        "bfloat16",
        "ck_tile attention",
    ),
    # AMD matrix products: MI is the matrix instruction, the first letter the type
    (
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1_CLR1"),
        "gfx942",
        True,
        "bfloat16",
        "MI16x16x1",
    ),
    (
        "Cijk_Ailk_Bljk_BBS_BH_MT256x112x64_MI16x16x16x1_SN_1LDSB0_APM1_ABV0_ACED0_AF0EM1_AF1EM1",
        "gfx942",
        True,
        "bfloat16",
        "MI16x16x16x1",
    ),
    (
        ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x128_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1"),
        "gfx942",
        True,
        "bfloat16",
        "MI, the newer spelling of types",
    ),
    (
        ("Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1_CLR1"),
        "gfx942",
        True,
        "float32",
        "CDNA multiplies float32 on matrix cores too",
    ),
    (
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0_AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0"),
        "gfx90a",
        True,
        "float32",
        "the same on MI250",
    ),
    (
        ("Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x64x32_MI32x32x1_SN_LDSB0_AFC1_AFEM1_AFEM1_ASEM1_CLR1"),
        "gfx90a",
        True,
        "bfloat16",
        "MI32x32x1",
    ),
    (
        (
            "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1_1x4x1x64_tb1x"
            "8x2x1_1x4x1x64_gkgs"
        ),
        "gfx942",
        True,
        "bfloat16",
        "MIOpen's assembly on xdlops",
    ),
    (
        (
            "igemm_wrw_gtcx2_nhwc_bf16_bx0_ex1_bt256x128x16_wt32x32x8_ws2x1_wr2x2_ta1x4x1x4_1x4x1x64_tb1x"
            "4x1x2_1x4x1x64_gkgs"
        ),
        "gfx90a",
        True,
        "bfloat16",
        "the same for weights",
    ),
    (
        (
            "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28"
            "GridwiseGemm_xdl_cshuffle_v3INS_13tensor_layout4gemm8RowMajorENS6_11ColumnMajorES7_ttfttNS0_"
            "12element_wise11PassThroughE"
        ),
        "gfx942",
        True,
        None,
        "xdl, though element_wise stands in the name",
    ),
    (
        (
            "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0"
            "mk1_bk0nk1_mn_xdlops_bwd_weightILi64EttftLNS_25InMemoryDataOperationEnumE1E"
        ),
        "gfx942",
        True,
        None,
        "xdlops",
    ),
    (
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1",
        "gfx942",
        True,
        "bfloat16",
        "a Triton product, types in its name",
    ),
    (
        "SubTensorOpWithScalar1d",
        "gfx942",
        False,
        None,
        "TensorOp in the name, arithmetic on each element",
    ),
    (
        "batched_transpose_32x32_half",
        "gfx90a",
        False,
        None,
        "a transpose",
    ),
    (
        "Im2d2Col_v2",
        "gfx942",
        False,
        None,
        "unrolls an image",
    ),
    (
        "MIOpenBatchNormFwdTrainSpatial",
        "gfx942",
        False,
        None,
        "a normalization",
    ),
    (
        ("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassINS_27Rmsnorm2dFwdPipelineProblem"),
        "gfx942",
        False,
        None,
        "a normalization of ck_tile",
    ),
    # what convolutions and products launch beside themselves
    (
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true"),
        "sm_90",
        False,
        None,
        "a change of layout inside a bfloat16 convolution",
    ),
    (
        "cask_cudnn::computeOffsetsKernel(cask_cudnn::ComputeOffsetsParams)",
        "sm_70",
        False,
        None,
        "set-up",
    ),
    (
        (
            "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::imp"
            "licit_gemm::fprop::Warp_specialized_params_non_template<xmma__5x_cudnn::Grid_constant_params"
            "> >"
        ),
        "sm_90",
        False,
        None,
        "set-up, though xmma stands in the name",
    ),
    (
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(cublasLt"),
        "sm_90",
        False,
        None,
        "adds partial results",
    ),
    (
        (
            "void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, "
            "int, long, float*"
        ),
        "sm_80",
        False,
        None,
        "an epilogue of its own",
    ),
    (
        (
            "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::winograd_nonfused"
            "::WinogradDataParams<float, float>)"
        ),
        "sm_70",
        False,
        None,
        "a transform, not the product",
    ),
    # Inductor
    (
        "triton_poi_fused_mm_0",
        "sm_90",
        False,
        None,
        "named after the product it feeds, pointwise",
    ),
    (
        "triton_poi_fused__to_copy_add_mm_22",
        "gfx942",
        False,
        None,
        "the same",
    ),
    (
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
        "gfx942",
        False,
        None,
        "an RMS norm",
    ),
    (
        "triton_per_fused_sum_10",
        "sm_90",
        False,
        None,
        "a sum",
    ),
    (
        "triton_red_fused__log_softmax_mm_prepare_softmax_online_16",
        "sm_90",
        None,
        None,
        "a reduction that could hold a dot",
    ),
    (
        "triton__0d1d2d3d",
        "sm_80",
        None,
        None,
        "an old Inductor name that says nothing",
    ),
    # the rest of a step
    (
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::d"
            "irect_copy_kernel"
        ),
        "sm_90",
        False,
        None,
        "a copy",
    ),
    (
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>(float*"),
        "sm_90",
        False,
        None,
        "softmax",
    ),
    (
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous nam"
            "espace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMa"
            "thFunc"
        ),
        "sm_90",
        False,
        None,
        "an optimizer, though mMath stands in the name",
    ),
    (
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long, long, float const*"),
        "sm_70",
        False,
        None,
        "a normalization, though amma stands in the name",
    ),
    (
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "sm_90",
        False,
        None,
        "communication",
    ),
    (
        (
            "void split_embedding_codegen_forward_unweighted_kernel<c10::Half, c10::Half, float, false, l"
            "ong, 2ul, 32ul>("
        ),
        "sm_80",
        False,
        None,
        "a lookup",
    ),
    (
        "Kernel",
        "sm_90",
        None,
        None,
        "says nothing",
    ),
    (
        "_finalize_matmul_scatter_bf16",
        "gfx942",
        None,
        None,
        "after a product, perhaps without one",
    ),
]


@pytest.mark.parametrize(
    ("name", "arch", "used", "dtype", "why"), NAMES, ids=[f"{i}-{entry[0][:40]}" for i, entry in enumerate(NAMES)]
)
def test_what_a_recorded_name_says(name: str, arch: str, used: bool | None, dtype: str | None, why: str) -> None:
    found = explain(name, arch=arch)
    assert found.used is used, (why, found.reason)
    assert found.reason
    assert dtype_of_name(name) == dtype
    assert tensor_use(name, arch=arch) is used


def test_the_list_is_long_enough_and_each_name_is_there_once() -> None:
    assert len({(entry[0], entry[1]) for entry in NAMES}) == len(NAMES) > 60
    assert {entry[2] for entry in NAMES} == {True, False, None}


@pytest.mark.parametrize(
    ("family", "dtype", "arch", "used", "reason"),
    [
        ("matmul", "bfloat16", "sm_90", True, "a bfloat16 matmul on sm_90"),
        ("convolution", "float16", "sm_70", True, "a float16 convolution on sm_70"),
        ("attention", "bfloat16", "sm_80", True, "a bfloat16 attention on sm_80"),
        ("matmul", "bfloat16", "sm_75", False, "sm_75 has no bfloat16 matrix instruction"),
        ("matmul", "float8_e4m3fn", "sm_90", True, "a float8_e4m3fn matmul on sm_90"),
        ("matmul", "float8_e4m3fn", "sm_80", False, "sm_80 has no float8_e4m3fn matrix instruction"),
        ("matmul", "tfloat32", "sm_86", True, "a tfloat32 matmul on sm_86"),
        ("matmul", "int8", "sm_75", True, "a int8 matmul on sm_75"),
        # TF32 is a setting of the run, not of the operator.
        ("matmul", "float32", "sm_90", None, "a float32 matmul on sm_90 may run on either kind of unit"),
        ("matmul", "float32", "sm_75", False, "sm_75 has no float32 matrix instruction"),
        ("matmul", "float64", "sm_80", None, "a float64 matmul on sm_80 may run on either kind of unit"),
        ("matmul", "float64", "sm_70", False, "sm_70 has no float64 matrix instruction"),
        ("matmul", "complex64", "sm_90", None, "a complex64 matmul on sm_90 may run on either kind of unit"),
        ("matmul", "bfloat16", "gfx942", True, "a bfloat16 matmul on gfx942"),
        ("matmul", "float32", "gfx942", None, "a float32 matmul on gfx942 may run on either kind of unit"),
        ("matmul", "bfloat16", "gfx906", False, "gfx906 has no matrix units"),
        ("matmul", "float16", "sm_60", False, "sm_60 has no matrix units"),
        ("matmul", "bfloat16", None, None, "the architecture of the device is unknown"),
        ("matmul", None, "sm_90", None, "the data type of the matmul is not recorded"),
        ("recurrent", "float16", "sm_90", None, "neither the name nor an operator"),
        ("custom", "bfloat16", "sm_90", None, "neither the name nor an operator"),
        ("normalization", "bfloat16", "sm_90", None, "neither the name nor an operator"),
        ("reduction", "bfloat16", "sm_90", False, "a reduction operator holds no matrix product"),
        (None, None, "sm_90", None, "neither the name nor an operator"),
    ],
)
def test_operator_and_type_decide_where_the_name_says_nothing(
    family: str | None, dtype: str | None, arch: str | None, used: bool | None, reason: str
) -> None:
    found = explain("triton_tem_fused_0", family, dtype, arch)
    assert found.used is used
    assert reason in found.reason


def test_a_stated_instruction_outweighs_the_operator() -> None:
    # A bfloat16 convolution also launches changes of layout, a split product also sums.
    assert tensor_use("void cudnn::ops::nchwToNhwcKernel<float>", "convolution", "bfloat16", "sm_90") is False
    assert tensor_use("void cublasLt::splitKreduce_kernel<32>", "matmul", "bfloat16", "sm_90") is False
    # A float32 operator runs in TF32 where the kernel says so, and on vector units where it says that.
    tf32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_32x6_tn_align4>"
    assert tensor_use(tf32, "matmul", "float32", "sm_80") is True
    assert tensor_use("ampere_sgemm_128x64_nn", "matmul", "float32", "sm_80") is False
    # A device without tensor cores outweighs both.
    assert tensor_use("flash_fwd_hdim64_bf16_sm80<>", "attention", "bfloat16", "sm_61") is False


def test_the_type_in_the_name_serves_where_none_was_recorded() -> None:
    name = "volta_fp16_gemm_128x128"  # a name without an instruction
    assert dtype_of_name(name) == "float16"
    assert tensor_use(name, "matmul", None, "sm_70") is True
    assert tensor_use(name, None, None, "sm_70") is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cutlass_80_tensorop_s1688gemm_128x128", "tfloat32"),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128", "bfloat16"),
        ("cutlass_75_tensorop_f16_s1688gemm_f16_128x128", "float16"),
        ("cutlass_80_tensorop_s1688bf16gemm_128x128", "bfloat16"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "float16"),
        ("turing_s1688gemm_128x128", None),
        ("volta_h884gemm_128x128_ldg8_nn", "float16"),
    ],
)
def test_s1688_alone_is_no_type(name: str, dtype: str | None) -> None:
    assert dtype_of_name(name) == dtype
    assert tensor_use(name) is True


def test_families_do_not_overlap() -> None:
    assert not MATRIX_FAMILIES & OTHER_FAMILIES


@pytest.mark.parametrize("name", ["", "x" * 100_000, "flash_fwd_" * 10_000, "Cijk_" * 20_000, "\x00", "名前"])
def test_any_name_is_answered(name: str) -> None:
    assert explain(name, "matmul", "bfloat16", "sm_90").used in (True, False)
    assert dtype_of_name(name) is None


def agrees_with_the_tensor_pipe(name: str, percent: float) -> None:
    used = tensor_use(name, arch="sm_90")
    if percent > 20:
        assert used is True
    elif "elementwise" in name or "softmax" in name:
        assert used is not True


# Kernel names as Nsight Compute prints them, and sm__pipe_tensor_cycles_active in percent, on one H200.
PIPE = [
    ("void at::<unnamed>::distribution_elementwise_grid_stride_kernel<float, 4, void templates::normal_", 1.34),
    ("void at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)", 0.0),
    ("void at::triu_tril_kernel<float, int, 0, 2, 0>(detail::TensorInfo<T1, T2>, detail", 1.07),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", 50.36),
    ("void at::elementwise_kernel<128, 4, void at::gpu_kernel_impl_nocast<at::<unnamed>::masked_fill_kernel", 2.33),
    ("void <unnamed>::softmax_warp_forward<float, float, float, 11, 0, 0>(T2 *, const T1 *, int, int, int)", 1.54),
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", 51.15),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", 64.14),
]


@pytest.mark.parametrize(("name", "percent"), PIPE)
def test_the_tensor_pipe_of_the_profiler_agrees(name: str, percent: float) -> None:
    agrees_with_the_tensor_pipe(name, percent)
    assert tensor_use(name, arch="sm_90") is (percent > 20)


@pytest.mark.skipif(not NCU.exists(), reason="the shared recordings are not beside this checkout")
def test_the_tensor_pipe_of_the_profiler_agrees_for_every_recorded_kernel() -> None:
    lines = [line for line in NCU.read_text(encoding="utf-8").splitlines() if not line.startswith("==")]
    rows = list(csv.DictReader(lines))[1:]  # the first row holds units
    for row in rows:
        agrees_with_the_tensor_pipe(
            row["Kernel Name"], float(row["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"])
        )
    assert len(rows) == 20


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not beside this checkout")
@pytest.mark.parametrize(
    ("path", "arch"),
    [
        (TRACES / "tracelens-h100-bert-small.json.gz", "sm_90"),
        (TRACES / "tracelens-h100-vit-nsfw.json.gz", "sm_90"),
        (TRACES / "tracelens-mi300-resnet-ddp8-actckpt-rank0.json.gz", "gfx942"),
        (TRACES / "hta-a100-alexnet-bench.json.gz", "sm_80"),
        (SHARED / "h200" / "h200_resnet50_dataloader_bound_fp32.json.gz", "sm_90"),
        (SHARED / "h200" / "h200_gpt_fused_compiled_bf16.json.gz", "sm_90"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_no_kernel_around_a_product_counts_as_one(path: Path, arch: str) -> None:
    """Over every name of a trace: what is elementwise, a reduction or communication is never a matrix kernel."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if str(event.get("cat", "")).lower() == "kernel"}
    used = {name for name in names if tensor_use(name, arch=arch)}
    assert used
    others = ("elementwise_kernel", "reduce_kernel", "oftmax_", "multi_tensor", "norm", "nccl", "triton_poi", "Nhwc")
    assert not [name for name in used if any(word in name for word in others)]
    telling = ("gemm", "nvjet", "Cijk", "conv", "attn", "flash", "fprop", "dgrad", "wgrad")
    assert all(any(word in name for word in telling) for name in used)


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not beside this checkout")
def test_a_mangled_cutlass_name_states_its_instruction_far_inside() -> None:
    with gzip.open(TRACES / "hta-a100-ddp-nccl-meta-rank0.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "kernel"}
    mangled = [name for name in names if name.startswith("_ZN") and "cutlass" in name]
    assert mangled
    assert all(name.index("MmaTensorOp") > 500 for name in mangled)
    assert all(tensor_use(name, arch="sm_80") is True and dtype_of_name(name) == "tfloat32" for name in mangled)
