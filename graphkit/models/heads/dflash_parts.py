"""What DSPARK and DFLASH 2 add to a draft model of DFLASH.

Both let a draft depend on the drafts before it, which one forward over mask tokens cannot: DSPARK
by a head that biases the logits of a row by the token before it, DFLASH 2 by a choice among the
best tokens of each row. DFLASH 2 also has a convolution over the rows of a block, before and after
each attention and each MLP.

Tensor suffixes: B requests, W rows of a block, H hidden, R rank, V vocabulary, C candidates,
K taps, G groups of channels.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from graphkit.errors import ConfigError
from graphkit.models.heads.layers import OwnLayer
from graphkit.models.quantization.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """How the blocks of a head differ from those of DFLASH, by the names of ``config.json``.

    Attributes:
        sample_from_anchor: Whether a row predicts the token behind its own, so that the bonus token
            predicts the first draft.
        markov_rank: Rank of the Markov head of DSPARK; 0 without one.
        markov_head_type: "vanilla", "gated" or "rnn".
        selector_rank, selector_top_k: Rank and candidates per row of DFLASH 2; 0 without.
        conv_kernel_size, conv_group_size: Taps and channels of a group; 0 without.
        output_multiplier: Factor on the logits.
        final_logit_softcapping: Bound of the logits after that; 0 for none.
        window: Keys up to its own that a row of ``windowed_layers`` sees.
        windowed_layers: Layers with a window.
        is_causal: Whether the rows of a block in these layers see no later rows.
    """

    sample_from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    window: int = 0
    windowed_layers: tuple[int, ...] = ()
    is_causal: bool = False

    def check(self, hidden_size: int, vocab_size: int) -> None:
        """Refuse options that no head of these sizes has.

        Raises:
            ConfigError: A value is out of range, or misses or excludes another one.
        """
        group, taps = self.conv_group_size, self.conv_kernel_size
        pairs = (self.selector_rank, self.selector_top_k), (taps, group)
        is_valid = (
            self.markov_head_type in ("vanilla", "gated", "rnn")
            and min(self.markov_rank, *pairs[0], *pairs[1]) >= 0
            and all(bool(one) == bool(other) for one, other in pairs)
            and self.selector_top_k <= vocab_size
            and not (self.markov_rank and self.selector_rank)
            and hidden_size % (group or 1) == 0
        )
        if not is_valid:
            raise ConfigError(
                f"no draft head of hidden size {hidden_size} and {vocab_size} tokens has {self!r}. "
                "Correct config.json.",
                field="options",
            )


class MarkovHead(nn.Module):
    """The bias of the logits of a row by the token before it.

    ``gated`` scales the embedding of that token by a gate of the row's hidden state; ``rnn`` keeps
    a state over the rows of a block.

    Args:
        vocab_size: Tokens.
        rank: Elements of an embedding (R).
        kind: "vanilla", "gated" or "rnn".
        hidden_size: Elements of a hidden state.
    """

    def __init__(self, vocab_size: int, rank: int, kind: str, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, vocab_size, bias=False)
        self.kind = kind
        if kind == "gated":
            self.gate_proj = Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = Linear(2 * rank + hidden_size, 3 * rank)

    def forward(
        self, logits_BV: Tensor, hidden_BH: Tensor, previous_B: Tensor, state_BR: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of a row and the state behind it, from those before."""
        bias_BR = before_BR = self.markov_w1(previous_B)
        if self.kind == "gated":
            gate_BR = torch.sigmoid(self.gate_proj(torch.cat([hidden_BH, before_BR], -1)))
            bias_BR = gate_BR * before_BR
        if self.kind == "rnn":
            state_BR = torch.zeros_like(before_BR) if state_BR is None else state_BR
            joint = self.joint_proj(torch.cat([state_BR, before_BR, hidden_BH], -1))
            gate_BR, new_BR, bias_BR = joint.chunk(3, -1)
            gate_BR, bias_BR = torch.sigmoid(gate_BR), bias_BR.tanh()
            state_BR = gate_BR * state_BR + (1 - gate_BR) * new_BR.tanh()
        return logits_BV + self.markov_w2(bias_BR), state_BR


class CandidateSelector(nn.Module):
    """The choice among the best tokens of a row by the token before it.

    Args:
        vocab_size: Tokens.
        rank: Elements of a token's two codes (R).
        top_k: Candidates of a row (C).
        hidden_size: Elements of a hidden state.
    """

    def __init__(self, vocab_size: int, rank: int, top_k: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocab_size, rank)
        self.successor_codebook = nn.Embedding(vocab_size, rank)
        self.hidden_projection = Linear(hidden_size, rank, bias=False)
        self.top_k = top_k

    def forward(
        self, logits_BV: Tensor, hidden_BH: Tensor, previous_B: Tensor, _state: Tensor | None
    ) -> tuple[Tensor, None]:
        """Return the scores of the candidates, and the lowest number for other tokens."""
        logits_BC, candidates_BC = logits_BV.topk(self.top_k)
        key_BR = self.predecessor_codebook(previous_B) * self.hidden_projection(hidden_BH)
        edges_BC = (self.successor_codebook(candidates_BC) @ key_BR[..., None])[..., 0]
        lowest_BV = torch.full_like(logits_BV, torch.finfo(logits_BV.dtype).min)
        return lowest_BV.scatter(1, candidates_BC, logits_BC + edges_BC), None


class BlockConvolution(nn.Module):
    """A causal convolution over the rows of a block, before and after a module.

    A kernel is a base and a part that depends on the row, which a group of channels shares.

    Args:
        size: Elements of a row.
        taps: Rows that a row depends on, its own included (K).
        group: Channels of a group.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = Linear(size, 2 * taps * (size // group), bias=False)
        self.group = group

    def forward(self, rows_1TH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the input of the module, [1, T, H], and the kernels of its output.

        Args:
            rows_1TH: Rows of blocks, one after the other.
            width: Rows of a block.
        """
        shape = -1, width, *self.base_kernel.shape[:2], self.base_kernel.shape[2] // self.group
        kernels = self.kernel_projection(rows_1TH).view(shape)
        return self.convolved(rows_1TH, kernels[:, :, 0], 0), kernels[:, :, 1]

    def convolved(self, rows_1TH: Tensor, kernels_BWKG: Tensor, side: int = 1) -> Tensor:
        """Return the convolution of rows, [1, T, H]; side 0 is before the module, 1 behind it."""
        requests, width, taps, groups = kernels_BWKG.shape
        rows = rows_1TH.view(requests, width, groups, self.group)
        total = torch.zeros_like(rows)
        for tap in range(min(taps, width)):
            earlier = pad(rows[:, : width - tap], (0, 0, 0, 0, tap, 0))
            base = self.base_kernel[side, tap].view(groups, self.group)
            total = total + (base + kernels_BWKG[:, :, tap, :, None]) * earlier
        return total.view(rows_1TH.shape)


class DFlash2Layer(OwnLayer):
    """A decoder layer with convolutions around its attention and its MLP.

    Args:
        layer: A decoder layer of transformers, whose modules this one takes over.
        size: The hidden size.
        options: Sizes of the convolutions.
    """

    def __init__(self, layer: nn.Module, size: int, options: BlockOptions) -> None:
        super().__init__(layer)
        sizes = size, options.conv_kernel_size, options.conv_group_size
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def forward(
        self, hidden_1TH: Tensor, position_embeddings: tuple[Tensor, Tensor], width: int
    ) -> Tensor:
        """Return the residual stream, [1, T, H], of blocks of ``width`` rows."""
        rows_1TH, kernels = self.attention_conv(self.input_layernorm(hidden_1TH), width)
        mixed_1TH, _ = self.self_attn(
            hidden_states=rows_1TH, attention_mask=None, position_embeddings=position_embeddings
        )
        hidden_1TH = hidden_1TH + self.attention_conv.convolved(mixed_1TH, kernels)
        rows_1TH, kernels = self.mlp_conv(self.post_attention_layernorm(hidden_1TH), width)
        return hidden_1TH + self.mlp_conv.convolved(self.mlp(rows_1TH), kernels)
