"""Settings of quantised folders: where they are stored, and which keys and values are known.

A key is read, or known to change no weight, or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphkit.errors import CheckpointError, short_repr
from graphkit.ops.quantized_layout import BLOCK

Settings = Mapping[str, Any]

_EVERYWHERE = frozenset({
    "quant_method", "modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers",
    "modules_to_convert", "kv_cache_scheme", "kv_cache_quant_algo", "producer", "meta", "backend",
    "lm_head", "_load_in_4bit", "_load_in_8bit", "quantization_status",
})  # fmt: skip
"""Keys of several methods. The stored tensors say which layers are quantised."""
_CALIBRATION = frozenset({
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset", "mse",
    "tokenizer", "model_name_or_path", "model_file_base_name", "model_seqlen", "model_type",
    "module_name_preceding_first_block", "block_name_to_quantize", "modules_in_block_to_quantize",
    "quant_block_list", "to_quant_block_names", "cache_block_outputs", "pad_token_id", "quantizer",
    "batch_size", "train_bs", "seqlen", "iters", "nsamples", "n_samples", "lr", "minmax_lr", "amp",
    "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "low_gpu_mem_usage",
    "enable_quanted_input", "gradient_accumulate_steps", "not_use_best_mse", "dynamic_max_gap",
    "act_group_aware", "hyb_act", "v2", "gptaq", "gptaq_alpha", "pack_impl", "offload_to_disk",
    "offload_to_disk_path", "vram_strategy", "gc_mode", "compute_device_filter", "scale_dtype",
    "auto_forward_data_parallelism", "calibration_data_device", "fail_safe", "failsafe", "process",
    "wait_for_submodule_finalizers", "mock_quantization", "supported_types",
})  # fmt: skip
"""Keys of AutoGPTQ, GPTQModel and AutoRound about how the weights were found."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Values of a setting that graphkit reads.

    Attributes:
        names: Names of the setting; the first that is there counts.
        default: Its value if none is.
        allowed: The values.
    """

    names: tuple[str, ...]
    default: object
    allowed: tuple[object, ...]

    def check(self, method: str, settings: Settings) -> None:
        """Refuse another value.

        Raises:
            CheckpointError: It is another one.
        """
        present = (settings[name] for name in self.names if name in settings)
        value = next(present, self.default)
        if value not in self.allowed:
            raise CheckpointError(
                f"{self.names[0]} of {method} is {short_repr(value)}, and graphkit reads "
                f"{' or '.join(map(repr, self.allowed))}."
            )


_GROUPS, _BLOCKS = (BLOCK, -1), [BLOCK, BLOCK]
RULES: Mapping[str, tuple[Rule, ...]] = {
    "awq": (
        Rule(("bits", "w_bit"), 4, (4,)),
        Rule(("version", "format"), "gemm", ("gemm", "GEMM")),
        Rule(("zero_point",), True, (True,)),
        Rule(("desc_act",), False, (False,)),
        Rule(("group_size", "q_group_size"), BLOCK, _GROUPS),
    ),
    "gptq": (
        Rule(("bits",), None, (4,)),
        Rule(("desc_act",), False, (False,)),
        Rule(("checkpoint_format",), "gptq", ("gptq", None)),
        Rule(("format",), "gptq", ("gptq", None)),
        Rule(("group_size",), BLOCK, _GROUPS),
        Rule(("data_type",), "int", ("int", None)),
        Rule(("pack_dtype",), "int32", ("int32", None)),
        Rule(("is_marlin_format",), False, (False,)),
    ),
    "compressed-tensors": (),  # see ``PACKED`` and ``FLOAT``
    "fbgemm_fp8": (),
    "fp8": (
        Rule(("weight_block_size",), _BLOCKS, (_BLOCKS, None)),
        Rule(("fmt",), "e4m3", ("e4m3", "float8_e4m3fn")),
        Rule(("scale_fmt",), "float", ("float", "ue8m0", None)),
        Rule(("expert_dtype",), "fp8", ("fp8", None)),
    ),
    "modelopt": (
        Rule(("quant_algo",), None, ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", None)),
    ),
}
"""What graphkit reads of each method."""
_STATIC = Rule(("dynamic",), False, (False, None))
PACKED = (
    _STATIC,
    Rule(("num_bits",), None, (4,)),
    Rule(("type",), "int", ("int",)),
    Rule(("strategy",), None, ("group", "channel")),
    Rule(("group_size",), None, (*_GROUPS, None, 0)),
    Rule(("actorder",), None, (None, "static", "weight")),
)
"""What graphkit reads of the weights of a group of compressed-tensors, ``pack-quantized``."""
FLOAT = (
    _STATIC,
    Rule(("num_bits",), None, (8,)),
    Rule(("type",), None, ("float",)),
    Rule(("strategy",), None, ("tensor", "channel", "block")),
)
"""The same of ``float-quantized`` and ``naive-quantized``."""
FLOAT_BLOCKS = Rule(("block_structure",), None, (_BLOCKS,))
_OTHERS: Mapping[str, frozenset[str]] = {
    "awq": _CALIBRATION | {
        "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "checkpoint_format",
        "sym", "pack_dtype",
    },
    "gptq": _CALIBRATION | {
        "sym", "dynamic", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config",
        "max_input_length",
    },
    "compressed-tensors": frozenset({
        "format", "config_groups", "global_compression_ratio", "version", "run_compressed",
        "dequantize", "use_optimized_inference", "sparsity_config", "transform_config",
    }),
    "fbgemm_fp8": frozenset({"activation_scale_ub"}),
    "fp8": frozenset({"activation_scheme", "dequantize"}),
    "modelopt": frozenset({"config_groups", "group_size", "version"}),
}  # fmt: skip
"""Further keys that are known: they change no weight, or ``stored_layout`` reads them."""
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_WEIGHT_KEYS = frozenset({
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
})  # fmt: skip


def quantization_settings(config: Settings) -> Settings | None:
    """Return the settings of quantised layers with their ``quant_method``; ``None`` without any.

    They are ``quantization_config`` of ``config.json`` or of its ``text_config``, or
    ``compression_config`` of older folders of compressed-tensors.
    """
    text = config.get("text_config")
    places = [config, text if isinstance(text, Mapping) else {}]
    stored = [
        place[key]
        for place in places
        for key in ("quantization_config", "compression_config")
        if isinstance(place.get(key), Mapping)
    ]
    if not stored:
        return None
    settings = dict(stored[0])
    nested = settings.pop("quantization", None)  # as in hf_quant_config.json
    settings |= nested if isinstance(nested, Mapping) else {}
    if "quant_method" not in settings:
        if "quant_algo" in settings:
            settings["quant_method"] = "modelopt"
        elif "config_groups" in settings:
            settings["quant_method"] = "compressed-tensors"
    return settings


def check_quantization_keys(settings: Settings) -> None:
    """Check that every key is known for the method, if that is one that graphkit reads.

    Raises:
        CheckpointError: A key with a value is not known; it is named.
    """
    method = str(settings.get("quant_method", ""))
    if method not in RULES:
        return
    read = {name for rule in RULES[method] for name in rule.names}
    _check("quantization_config", method, settings, _OTHERS[method] | _EVERYWHERE | read)
    groups = settings.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping):
        return
    for name, group in groups.items():
        if isinstance(group, Mapping):
            _check(f"config_groups.{name}", method, group, _GROUP_KEYS)
            weights = group.get("weights")
            if isinstance(weights, Mapping):
                _check(f"config_groups.{name}.weights", method, weights, _WEIGHT_KEYS)


def _check(place: str, method: str, settings: Settings, known: frozenset[str]) -> None:
    for key, value in settings.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise CheckpointError(
                f"{place} of {method} has {key}={str(value)[:60]}, which graphkit does not know. "
                "It may change the weights. Remove it from the settings if it does not."
            )
