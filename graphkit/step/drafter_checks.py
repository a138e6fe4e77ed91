"""Checks of a drafter and of the trees that it returns.

They read types, shapes and dtypes. Values are read only where the tensors are on the CPU, so that
no check waits for the device, and in the checking mode (``GRAPHKIT_CHECK=1``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphkit.config import require_int
from graphkit.errors import ConfigError, InputError, OutputError
from graphkit.graphs import is_capturing
from graphkit.ops.argument_rules import describe
from graphkit.runners import Runner
from graphkit.spec.signatures import signature_mismatch
from graphkit.step.context import EngineContext
from graphkit.step.drafter import Drafter
from graphkit.step.step_tensors import DraftTree
from graphkit.step.tree_checks import check_links, check_probs

_METHODS = ("prepare", "prefill", "draft", "extend", "extend_accepted")
_TREE_TENSORS = {
    "draft_tokens": ("[B * W]", torch.int64),
    "tree_mask": ("[B, W, W]", torch.bool),
    "retrieve_index": ("[B, W]", torch.int64),
    "retrieve_next_token": ("[B, W]", torch.int64),
    "retrieve_next_sibling": ("[B, W]", torch.int64),
    "draft_probs": ("[B * W, V]", torch.float32),
}
"""Shape and dtype of each tensor of a ``DraftTree`` that the verifier reads."""
_SHAPES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "[B * W]": lambda batch_size, width, _: (batch_size * width,),
    "[B, W]": lambda batch_size, width, _: (batch_size, width),
    "[B, W, W]": lambda batch_size, width, _: (batch_size, width, width),
    "[B * W, V]": lambda batch_size, width, vocab_size: (batch_size * width, vocab_size),
}


def check_methods(drafter: object) -> None:
    """Check type and methods of a drafter, before ``prepare``.

    Raises:
        ConfigError: It is not a ``Drafter``, or an override has another signature.
    """
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter is {drafter!r}, expected an instance of Drafter or None.", field="drafter"
        )
    for name in _METHODS:
        if mismatch := signature_mismatch(drafter, name, Drafter):
            raise ConfigError(mismatch, field="drafter")


def check_prepared(drafter: Drafter) -> None:
    """Check what ``prepare`` has set.

    Raises:
        ConfigError: ``runners`` is not a tuple of runners, or a number is out of range.
    """
    owner = type(drafter).__name__
    runners: object = drafter.runners
    if not isinstance(runners, Sequence) or not all(isinstance(r, Runner) for r in runners):
        raise ConfigError(
            f"{owner}.runners is {runners!r}, expected a tuple of runners. Set it in prepare.",
            field="runners",
        )
    require_int(owner, "max_path", drafter.max_path)
    require_int(owner, "slots_needed", drafter.slots_needed, least=0)


def check_draft_width(owner: str, context: EngineContext) -> None:
    """Check that trees of ``num_draft_tokens`` nodes fit the algorithm's verify.

    A chain may have fewer nodes than verify: the rest of the rows is then not accepted.

    Args:
        owner: Name of the drafter's class, for messages.
        context: The engine's.

    Raises:
        ConfigError: Verify has fewer rows than the trees have nodes, or more than a tree has.
    """
    spec, width = context.spec, context.verify_width
    if width == spec.num_draft_tokens or (width > spec.num_draft_tokens and spec.topk == 1):
        return
    remedy = "" if width < spec.num_draft_tokens else ", or topk to 1: a chain may have fewer nodes"
    raise ConfigError(
        f"{spec.resolved!r} verifies {width} rows per request, but {owner} drafts "
        f"{spec.num_draft_tokens} nodes, SpecConfig.num_draft_tokens. Set num_draft_tokens to "
        f"{width}{remedy}.",
        field="num_draft_tokens",
    )


def require_hidden_states(owner: str, hidden_states: torch.Tensor | None) -> torch.Tensor:
    """Return the target's hidden states.

    Args:
        owner: Name of the class of the drafter that reads them, for messages.
        hidden_states: What the target's forward returned.

    Raises:
        OutputError: It returned none.
    """
    if hidden_states is None:
        raise OutputError(
            f"the target's forward returned no hidden_states, but the draft model of {owner} reads "
            "them. Return ForwardOutput(hidden_states=...), or use an algorithm whose "
            "is_standalone() is True."
        )
    return hidden_states


def check_tree(
    drafter: Drafter,
    tree: object,
    seq_lens: torch.Tensor,
    context: EngineContext,
) -> None:
    """Check the result of ``draft``.

    Args:
        drafter: The drafter that returned it.
        tree: What it returned.
        seq_lens: Committed tokens, [B]; gives the batch size and the device.
        context: The engine's.

    Raises:
        InputError: It is not a ``DraftTree``, or a tensor has a wrong type, shape, dtype or device.
            On the CPU and in the checking mode: a token is outside the vocabulary, or the links
            do not form a tree or contradict the mask. In the checking mode: ``draft_probs`` are not
            distributions. ``field`` names the tensor. Values are not checked while the step is
            captured.
    """
    method = f"{type(drafter).__name__}.draft"
    if not isinstance(tree, DraftTree):
        found = "None" if tree is None else type(tree).__name__
        raise InputError(f"{method} returned {found}, expected a DraftTree.", field="draft")
    batch_size, width, device = len(seq_lens), context.verify_width, seq_lens.device
    unread = {"tree_mask"} if context.spec.topk == 1 else set()
    if tree.draft_probs is None:
        unread.add("draft_probs")
    for name, (dims, dtype) in _TREE_TENSORS.items():
        if name in unread:
            continue
        tensor = getattr(tree, name)
        if not isinstance(tensor, torch.Tensor):
            found = type(tensor).__name__
            raise InputError(f"{method}: {name} is {found}, expected a tensor.", field=name)
        shape = _SHAPES[dims](batch_size, width, context.sizes.vocab_size)
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            expected = f"{dims} = {list(shape)} {str(dtype).removeprefix('torch.')} on {device}"
            raise InputError(
                f"{method}: {name} is {describe(tensor)}, expected {expected} for "
                f"{batch_size} requests and context.verify_width = {width} nodes per request.",
                field=name,
            )
    if is_capturing():
        return
    if device.type == "cpu" or context.is_checking:
        drafts = tree.draft_tokens.view(batch_size, width)[:, 1:]
        _check_vocabulary(method, drafts.cpu(), context)
        check_links(method, tree, is_chain=context.spec.topk == 1)
    if context.is_checking and tree.draft_probs is not None:
        check_probs(method, tree, tree.draft_probs)


def _check_vocabulary(method: str, drafts: torch.Tensor, context: EngineContext) -> None:
    """Refuse drafts [B, W - 1] outside the vocabulary; reads CPU memory."""
    tokens, vocab_size = drafts.numpy(), context.sizes.vocab_size
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise InputError(
            f"{method}: draft_tokens contains {outside[0]}, expected token ids from 0 to "
            f"{vocab_size - 1}.",
            field="draft_tokens",
        )
