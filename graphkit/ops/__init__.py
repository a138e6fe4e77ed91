"""Ops for draft trees, accepted tokens and KV slots.

Each is a function that calls one op of the dispatcher, ``torch.ops.graphkit.NAME``: a torch
reference on the CPU, Triton kernels of ``graphkit.ops.kernels`` on CUDA. None waits for the device;
all may be captured and compiled.
"""

from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.logits import apply_token_bitmask
from graphkit.ops.packed_accepted import (
    create_extend_after_decode_spec_info,
    create_num_accepted_drafts_filter,
    filter_finished_cache_loc,
    get_src_tgt_cache_loc,
    get_target_cache_loc,
)
from graphkit.ops.sampling import philox_uniform
from graphkit.ops.step_rows import rotate_input_ids
from graphkit.ops.tree import build_tree
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy

__all__ = [
    "apply_token_bitmask",
    "build_tree",
    "compact_accepted_to_front",
    "create_extend_after_decode_spec_info",
    "create_num_accepted_drafts_filter",
    "filter_finished_cache_loc",
    "get_src_tgt_cache_loc",
    "get_target_cache_loc",
    "philox_uniform",
    "rotate_input_ids",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]
