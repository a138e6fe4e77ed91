"""Names of kernels, demangled and shortened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graphkit.graphs.walk.kernels import demangled, short_name

FUZZ = settings(deadline=None, derandomize=True, max_examples=300)
ITERATOR = "at::TensorIteratorBase&"
ARRAY = "std::array<char*, 2ul>"


def elementwise(functor, base="vectorized_elementwise_kernel<4"):
    """The name of a generic elementwise kernel of torch."""
    return f"void at::native::{base}, {functor}, {ARRAY} >(int, {functor}, {ARRAY})"


def launcher_lambda(name, kind="float"):
    """A lambda inside of the function that launches the kernel."""
    inner = "{lambda()#2}::operator()() const::{lambda()#2}::operator()() const"
    return f"at::native::{name}({ITERATOR})::{inner}::{{lambda({kind})#1}}"


NO_CAST = (
    "at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&, "
    "at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> > const&)::{lambda(int)#1}"
)
NAN_MAX = (
    "at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
    "at::native::MaxNanFunctor<float> >, unsigned int, float, 4, 4>"
)
SUM = (
    "at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
    "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)"
    "::{lambda(float, float)#1}>, unsigned int, float, 4, 4>"
)
CLAMP = "at::native::(anonymous namespace)::clamp_kernel_impl"
OPAQUE = "at::native::(anonymous namespace)::OpaqueType<4u>"
SCAN = "at_cuda_detail::cub::detail::scan"

TORCH = {
    elementwise("at::native::CUDAFunctor_add<float>"): "vectorized_elementwise_kernel[add]",
    elementwise("at::native::CUDAFunctorOnSelf_add<long>"): "vectorized_elementwise_kernel[add]",
    elementwise("at::native::AbsFunctor<float>"): "vectorized_elementwise_kernel[Abs]",
    elementwise(
        "at::native::AUnaryFunctor<float, float, bool, "
        "at::native::(anonymous namespace)::CompareEqFunctor<float> >"
    ): "vectorized_elementwise_kernel[CompareEq]",
    elementwise(launcher_lambda("cos_kernel_cuda")): "vectorized_elementwise_kernel[cos]",
    elementwise(
        f"at::native::GeluCUDAKernelImpl({ITERATOR}, at::native::GeluType)::{{lambda()#2}}"
    ): "vectorized_elementwise_kernel[Gelu]",
    elementwise(
        launcher_lambda("direct_copy_kernel_cuda"), "unrolled_elementwise_kernel<128"
    ): "unrolled_elementwise_kernel[direct_copy]",
    elementwise(
        launcher_lambda("(anonymous namespace)::silu_kernel", "c10::BFloat16")
    ): "vectorized_elementwise_kernel[silu]",
    elementwise(
        f"at::native::(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>"
        f"({ITERATOR}, float)::{{lambda(float)#1}}"
    ): "vectorized_elementwise_kernel[pow_tensor_scalar]",
    elementwise(f"{CLAMP}({ITERATOR})::{{lambda(long)#1}}"): "vectorized_elementwise_kernel[clamp]",
    elementwise(
        "at::native::BUnaryFunctor<long, long, long, "
        f"{launcher_lambda('binary_internal::div_floor_kernel_cuda', 'long, long')}>"
    ): "vectorized_elementwise_kernel[div_floor]",
    elementwise(NO_CAST, "elementwise_kernel<128, 4"): "elementwise_kernel[Mul]",
    elementwise(
        f"at::native::gpu_kernel_impl<ns::Plain>({ITERATOR})::{{lambda(int)#1}}"
    ): "vectorized_elementwise_kernel",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, "
    "float, float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, "
    "at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4>)": (
        "reduce_kernel[Mean]"
    ),
    f"void at::native::reduce_kernel<512, 1, {NAN_MAX} >({NAN_MAX})": "reduce_kernel[MaxNan]",
    f"void at::native::reduce_kernel<512, 1, {SUM} >({SUM})": "reduce_kernel[sum]",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, "
    "long, long, bool)": "vectorized_gather_kernel",
    f"void at::native::(anonymous namespace)::CatArrayBatchedCopy<{OPAQUE}, unsigned int, 3, 64, "
    f"64>({OPAQUE}*, int, unsigned int)": "CatArrayBatchedCopy",
    "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned "
    "int, 2, 2, -2>(at::cuda::detail::TensorInfo<c10::BFloat16, unsigned int>, int, long)": (
        "indexSelectSmallIndex"
    ),
    "void at::native::bitonicSortKVInPlace<-2, -1, 16, 16, long, long, at::native::LTOp<long, "
    "true>, unsigned int>(at::cuda::detail::TensorInfo<long, unsigned int>)": (
        "bitonicSortKVInPlace"
    ),
    f"void {SCAN}::DeviceScanKernel<{SCAN}::policy_hub<long, std::plus<long> >::Policy1000, long "
    "const*, long*>(long const*, long*, int, std::plus<long>)": "DeviceScanKernel",
}
OTHERS = {
    "nvjet_sm90_tst_64x8_64x16_2x4_h_bz_TNT": "nvjet_sm90_tst_64x8_64x16_2x4_h_bz_TNT",
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8": (
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8"
    ),
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>"
    "(cudnnTensorStruct, float const*)": "bn_fw_tr_1C11_kernel_NCHW",
    "paged_attention_kernel": "paged_attention_kernel",
    "(anonymous namespace)::plain(int)": "plain",
    "void Sort<std::less<int>, &ns::operator< >::run<int>(int)": "run",
    "void fold<(ns::Mode)1, (&ns::T::operator->)>(int)": "fold",
    "unsigned long k<3>()": "k",
    "k(void (*)(int), int)": "k",
    "": "",
}


@pytest.mark.parametrize(("name", "expected"), {**TORCH, **OTHERS}.items(), ids=str)
def test_a_short_name_keeps_the_operation(name, expected):
    assert short_name(name) == expected


def test_short_names_of_torch_kernels_are_short():
    assert max(len(short_name(name)) for name in TORCH) < 60


def test_symbols_are_demangled():
    symbol = (
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_21CUDAFunctorOnSelf_addIfEE"
        "St5arrayIPcLm2EEEEviT0_T1_"
    )
    functor = "at::native::CUDAFunctorOnSelf_add<float>"
    assert demangled(symbol) == elementwise(functor)
    assert demangled("_ZN12_GLOBAL__N_15plainEi") == "(anonymous namespace)::plain(int)"


@pytest.mark.parametrize("name", ["", "_Z", "_Z3", "_Zé", "fetch_kernel", "Z3fooi"])
def test_a_name_that_is_no_symbol_is_unchanged(name):
    assert demangled(name) == name


@given(st.text() | st.text("ak_:<>(){}-, &~", max_size=40).map(lambda text: f"reduce_kernel{text}"))
@FUZZ
def test_any_name_is_shortened(name):
    name = name.replace("\0", "")
    assert isinstance(demangled(name), str)
    assert bool(short_name(name)) == bool(name)


@given(
    st.recursive(
        st.sampled_from(["int", "c10::BFloat16", "(anonymous namespace)::T", "4ul", "char*"]),
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(
            lambda each: f"ns::A<{', '.join(each)} >"
        ),
        max_leaves=8,
    )
)
@FUZZ
def test_nested_templates_are_left_out(argument):
    assert short_name(f"void ns::kernel_of<{argument}>({argument} const&, int)") == "kernel_of"
