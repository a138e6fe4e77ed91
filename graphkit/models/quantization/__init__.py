"""Linear layers, and weights of eight and four bits: their layout, and folders that have them."""

from graphkit.models.quantization.experts import QuantizedExperts
from graphkit.models.quantization.linear import (
    Linear,
    QuantizedLinear,
    merge_quantized,
    quantize_linears,
    restore_linears,
    set_row_invariant,
)
from graphkit.models.quantization.stored import StoredLayout, stored_layout
from graphkit.models.quantization.weight import (
    QUANTIZATIONS,
    QuantizedWeight,
    check_quantization,
    quantize_fp8,
    quantize_int4,
)

__all__ = [
    "QUANTIZATIONS",
    "Linear",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuantizedWeight",
    "StoredLayout",
    "check_quantization",
    "merge_quantized",
    "quantize_fp8",
    "quantize_int4",
    "quantize_linears",
    "restore_linears",
    "set_row_invariant",
    "stored_layout",
]
