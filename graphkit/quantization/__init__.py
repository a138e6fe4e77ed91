"""Weights of eight and four bits: their layout, their layers, and folders that have them."""

from graphkit.quantization.linear import (
    QuantizedLinear,
    merge_quantized,
    quantize_linears,
    restore_linears,
)
from graphkit.quantization.weight import (
    QUANTIZATIONS,
    QuantizedWeight,
    check_quantization,
    quantize_fp8,
    quantize_int4,
)

__all__ = [
    "QUANTIZATIONS",
    "QuantizedLinear",
    "QuantizedWeight",
    "check_quantization",
    "merge_quantized",
    "quantize_fp8",
    "quantize_int4",
    "quantize_linears",
    "restore_linears",
]
