"""Prefill and verification with the target, and acceptance of draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.config import bitmask_words
from graphkit.engine.step.acceptance import (
    AcceptedPath,
    Links,
    Verified,
    accept_greedily,
    accept_sampled,
    most_probable,
    move_accepted_kv,
    sample_tokens,
)
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import DraftTree
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.packed_rows import (
    PackedInputs,
    PackedOutput,
    PackedRows,
    PackedVerifyRunner,
)
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.engine.step.request_state import RequestState
from graphkit.errors import ConfigError
from graphkit.graphs import scope
from graphkit.ops import apply_token_bitmask, compact_accepted_to_front
from graphkit.ops.rows import gather_rows
from graphkit.ops.step_rows import pack_rows, verify_rows
from graphkit.runners import DecodeRunner, ForwardOutput, Runner, TargetVerifyRunner

FillBitmask = Callable[[torch.Tensor, Links], torch.Tensor]
"""Returns the token bitmask of trees, [B * W, ceil(V / 32)] int32 on the device or the CPU.

Its arguments are the token of each node, [B, W] int64, and the links. It may wait for the device.
"""


class Verifier:
    """Runs the target and accepts drafts.

    Methods enqueue work and do not wait for the device, except that ``verify`` waits if its
    ``fill_bitmask`` does.

    Args:
        model: The target.
        context: Settings and shared state.
        state: State of the requests.
        max_path: Most tokens that one step can accept, bonus included.

    Attributes:
        runner: Runs the target's forward.
        packed_runner: Runs it over packed rows by graphs; ``None`` until ``pack``.
        recurrent_state: States of the target's linear-attention or Mamba layers, or ``None``.

    Raises:
        ConfigError: The algorithm is plain decoding, but verify has more than one row.
    """

    def __init__(
        self,
        model: EngineModel,
        context: EngineContext,
        state: RequestState,
        max_path: int,
    ) -> None:
        self.context, self._state, self._max_path = context, state, max_path
        self._kv_pools, self.recurrent_state = model.kv_pools, model.recurrent_state
        self.repeats_steps = not model.is_row_invariant or model.recurrent_state is not None
        self._is_tree = context.spec.topk > 1
        is_none = context.spec.resolved.is_none()
        if is_none and context.verify_width > 1:
            raise ConfigError(
                f"{context.spec.resolved!r}.is_none() is True: plain decoding. But verify has "
                f"{context.verify_width} rows per request. Return False, or set num_draft_tokens "
                "to 1.",
                field="num_draft_tokens",
            )
        runner = DecodeRunner if is_none else TargetVerifyRunner
        self.runner: Runner[TargetVerifyInputs, ForwardOutput] = runner(
            model.forward,
            spec=context.spec,
            sizes=context.sizes,
            attention=model.attention,
            optional_fields=self._optional_fields(),
            **context.runner_options,
        )
        self.packed_runner: PackedVerifyRunner | None = None
        self._all_allowed: torch.Tensor | None = None
        if context.options.structured_output:  # every batch of the runner then needs a bitmask
            num_tokens = context.sizes.max_batch_size * context.verify_width
            shape = num_tokens, bitmask_words(context.sizes.vocab_size)
            self._all_allowed = torch.full(shape, -1, dtype=torch.int32, device=context.device)

    @property
    def packs_rows(self) -> bool:
        """Whether verify can divide its rows among the requests: chains, with packed attention.

        Attention that plans on the host would need the lengths there.
        """
        step, group = self.runner.step, self.context.options.group
        # Ranks agree on the replays of their runners alone, and on the loops.
        is_alone = group is None or (self.context.generation == "v3" and not group.no_loop_reason)
        return not self._is_tree and is_alone and step.packs_rows and not step.plans_on_host

    def pack(self, row_counts: Sequence[int]) -> None:
        """Create the runner of packed rows, for the graphs of v1 and v2.

        Args:
            row_counts: Numbers of rows to capture.
        """
        self.packed_runner = PackedVerifyRunner(self.runner, self.context, row_counts)

    def prefill(
        self,
        batch: PrefillBatch,
        new_rows: torch.Tensor | None,
        replay: Callable[[PrefillBatch], ForwardOutput] | None = None,
    ) -> ForwardOutput:
        """Run the target over packed chunks of prompts.

        Args:
            batch: The chunks.
            new_rows: Request rows of prompts that begin, [N] int64; ``None`` if none does.
            replay: Replays a graph of the target; ``None`` runs its forward without one.

        Returns:
            Logits of the last token of each chunk, [B, V], and hidden states of all tokens, [T, D].
        """
        states = self.recurrent_state
        if states is not None and new_rows is not None:
            states.reset(new_rows)
        if replay is not None:
            output = replay(batch)
        else:
            output = self.runner.fall_back(
                batch.target_inputs(), without=("custom_mask", "token_bitmask")
            )
        if states is not None:
            # All tokens of a prompt are accepted. The pool has the states after the last W places
            # of the chunks, W = states.width; the last place has the state after the last token.
            rows = batch.req_pool_indices
            states.commit(rows, torch.full_like(rows, min(max(batch.lengths), states.width) - 1))
        return output

    @property
    def most_step_rows(self) -> int:
        """Most rows of ``repeat_steps``: those of the largest step, or of one of its requests."""
        states = self.recurrent_state
        return self.context.sizes.max_batch_size if states is None else states.width

    def repeat_steps(self, batch: PrefillBatch) -> ForwardOutput:
        """Run the target eagerly over output that steps have computed before, as rows of a step.

        Each token is a request of one row, which reads the tokens before it. Recurrent layers need
        the tokens of one request in order: they are a chain of drafts, all of which are accepted.

        Args:
            batch: The tokens, at most ``most_step_rows``; with recurrent layers, of one request.

        Returns:
            As ``prefill``.
        """
        states = self.recurrent_state
        if states is None:
            rows, seq_lens = batch.row_indices, batch.positions.int()
        else:
            rows, seq_lens = batch.req_pool_indices, batch.positions[:1].int()
        inputs = TargetVerifyInputs(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_cache_loc=batch.out_cache_loc,
        )
        output = self.runner.fall_back(inputs, without=("custom_mask", "token_bitmask"))
        if states is not None:
            states.commit(rows, torch.full_like(rows, len(batch.positions) - 1))
        return replace(output, next_token_logits=output.next_token_logits[batch.last_rows])

    def first_tokens(
        self,
        req_pool_indices: torch.Tensor,
        logits: torch.Tensor,
        *,
        is_greedy: bool,
        bitmask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the token after each prompt, [B] int64, and ``log_sums`` of its logits.

        A sample is keyed by the position of the last prompt token, as if that were the root of a
        tree.

        Args:
            req_pool_indices: The request rows, [B] int64.
            logits: The last logits of each prompt, [B, V]; changed in place.
            is_greedy: Whether every temperature is 0.
            bitmask: Allowed tokens, [B, ceil(V / 32)] int32; ``None`` allows all.
        """
        rows, state = req_pool_indices, self._state
        if bitmask is not None:
            apply_token_bitmask(logits, bitmask)
        roots = rows[:, None]  # stands for the tokens of roots, which are not read
        positions = state.seq_lens[rows].long()
        processed = state.processors.process(logits, rows, roots, None, positions, state.stop_ids)
        if is_greedy:
            return most_probable(processed), processed.log_sums
        return sample_tokens(processed, rows, state), processed.log_sums

    def verify(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        bonus: torch.Tensor,
        tree: DraftTree,
        *,
        is_greedy: bool,
        fill_bitmask: FillBitmask | None = None,
        num_drafts: torch.Tensor | None = None,
        num_rows: int = 0,
    ) -> Verified:
        """Run the target over the trees and accept a path of each.

        With ``num_drafts``, the trees are chains, of which the target verifies the first drafts.
        Results have W rows per request all the same; those behind the verified ones repeat the
        last.

        Args:
            req_pool_indices: Request rows, [B] int64.
            seq_lens: Committed tokens, [B] int32.
            bonus: Token at the root of each tree, [B] int64.
            tree: The draft tokens; ``check_tree`` has accepted them.
            is_greedy: Whether every temperature is 0.
            fill_bitmask: Returns the token bitmask of the trees; ``None`` allows every token.
            num_drafts: Drafts of each request to verify, [B] int32, -1 for pads; ``None`` verifies
                all.
            num_rows: Rows of the target's forward with ``num_drafts``, at least the drafts and
                roots.
        """
        rows, width = req_pool_indices, self.context.verify_width
        packed, links = None, (tree.retrieve_next_token, tree.retrieve_next_sibling)
        mask = tree.tree_mask.contiguous() if self._is_tree else None  # may be an expanded view
        with scope("build"):
            # Drafters may return ids outside the vocabulary, which the host cannot see on a device.
            # The op replaces them by valid ids, accepted only if they equal the target's tokens.
            tokens, positions, slots = verify_rows(
                rows, self.context.req_to_token, seq_lens, bonus, tree.draft_tokens, mask,
                width, self.context.sizes.vocab_size,
            )  # fmt: skip
            if num_drafts is not None:
                packed = PackedRows(
                    *pack_rows(num_drafts, rows, tokens, positions, slots, width, num_rows)
                )
        candidates = tokens.view(-1, width)
        if packed is not None:
            # A chain may end before its packed nodes do, where the drafter has no more drafts.
            links = torch.where(packed.next_token < 0, -1, links[0]), links[1]
        bitmask = self.all_allowed(len(tokens) if packed is None else num_rows)
        if fill_bitmask is not None:
            bitmask = fill_bitmask(candidates, links)
            if packed is not None:
                bitmask = bitmask.to(rows.device)[packed.nodes.clamp(min=0)]
        with scope("verify"):
            output = (
                self._run_packed(rows, seq_lens, packed, bitmask)
                if packed is not None
                else self.runner.run(
                    TargetVerifyInputs(
                        req_pool_indices=rows,
                        seq_lens=seq_lens,
                        input_ids=tokens,
                        positions=positions,
                        out_cache_loc=slots,
                        custom_mask=mask,
                        token_bitmask=bitmask,
                    )
                )
            )
        with scope("accept"):
            logits = self._state.processors.process(
                output.next_token_logits, rows, candidates, mask,
                positions if packed is None else packed.positions, self._state.stop_ids,
                None if packed is None else packed.nodes,
            )  # fmt: skip
            drafted = candidates, links, logits, self._max_path, packed
            path = (
                accept_greedily(*drafted)
                if is_greedy
                else accept_sampled(*drafted, rows, self._state, positions, tree.draft_probs)
            )
            hidden_states, logit_index = output.hidden_states, path.accept_index
            if packed is not None:
                logit_index = packed.row_of[path.accept_index.clamp(min=0)].int()
                if hidden_states is not None:
                    hidden_states = gather_rows(hidden_states, packed.row_of)
            hidden_states = self._keep_accepted(rows, slots, path, hidden_states)
        return Verified(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            predict=path.predict,
            hidden_states=hidden_states,
            accept_index=path.accept_index,
            counts=AcceptedCounts(path.num_accepted_drafts, path.num_accepted_tokens),
            logits=logits.logits,
            log_sums=logits.log_sums,
            logit_index=logit_index,
        )

    def _run_packed(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        packed: PackedRows,
        bitmask: torch.Tensor | None,
    ) -> ForwardOutput | PackedOutput:
        """Run the target over packed rows, by a graph of v1 and v2 if there is one."""
        runner, num_rows = self.packed_runner, len(packed.tokens)
        if runner is None or runner.status != "captured":
            return self.runner.fall_back(
                TargetVerifyInputs(
                    req_pool_indices=rows,
                    seq_lens=seq_lens,
                    input_ids=packed.tokens,
                    positions=packed.positions,
                    out_cache_loc=packed.slots,
                    token_bitmask=bitmask,
                    lengths=packed.lengths,
                    width=self.context.verify_width,
                    packs_nodes=True,
                )
            )
        behind = (0, num_rows - len(rows))
        return runner.replay(
            PackedInputs(
                req_pool_indices=pad(rows, behind),
                seq_lens=pad(seq_lens, behind),
                row_counts=pad(packed.lengths, behind),
                input_ids=packed.tokens,
                positions=packed.positions,
                out_cache_loc=packed.slots,
                token_bitmask=bitmask,
            )
        )

    def _keep_accepted(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        path: AcceptedPath,
        hidden_states: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Commit the states of accepted paths, and move their KV and hidden states to the front.

        Args:
            rows: Request rows, [B] int64.
            slots: KV slot of each node, [B * W] int64.
            path: The accepted paths.
            hidden_states: Hidden state of each node, [B * W, H]; ``None`` if there are none.

        Returns:
            The hidden states, the accepted ones of each request first.
        """
        accept_index, width = path.accept_index, self.context.verify_width
        if self.recurrent_state is not None:
            last = accept_index.gather(1, path.num_accepted_drafts.long()[:, None])[:, 0]
            self.recurrent_state.commit(rows, last % width)
        if not self._is_tree:
            return hidden_states
        move_accepted_kv(self._kv_pools, accept_index, slots, width)
        if hidden_states is None:
            return None
        return compact_accepted_to_front(hidden_states, accept_index, width)

    def all_allowed(self, num_tokens: int) -> torch.Tensor | None:
        """Return a token bitmask of ``num_tokens`` rows that allows all; ``None`` if unused."""
        return None if self._all_allowed is None else self._all_allowed[:num_tokens]

    def _optional_fields(self) -> tuple[str, ...] | None:
        """Return the optional fields of verify; ``None`` selects those that the spec implies."""
        if not self.context.options.structured_output:
            return None
        return ("custom_mask", "token_bitmask") if self._is_tree else ("token_bitmask",)
