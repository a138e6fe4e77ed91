from graphkit.ops.accepted_path import compact_accepted_to_front as compact_accepted_to_front
from graphkit.ops.logits import apply_token_bitmask as apply_token_bitmask
from graphkit.ops.packed_accepted import (
    create_extend_after_decode_spec_info as create_extend_after_decode_spec_info,
    create_num_accepted_drafts_filter as create_num_accepted_drafts_filter,
    filter_finished_cache_loc as filter_finished_cache_loc,
    get_src_tgt_cache_loc as get_src_tgt_cache_loc,
    get_target_cache_loc as get_target_cache_loc,
)
from graphkit.ops.sampling import philox_uniform as philox_uniform
from graphkit.ops.step_rows import rotate_input_ids as rotate_input_ids
from graphkit.ops.tree import build_tree as build_tree
from graphkit.ops.tree_sampling import (
    tree_speculative_sampling_target_only as tree_speculative_sampling_target_only,
)
from graphkit.ops.verification import verify_tree_greedy as verify_tree_greedy
