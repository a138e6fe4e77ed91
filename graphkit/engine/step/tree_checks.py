"""Checks of draft trees: types and shapes, tokens, links, mask and probabilities.

Values are read only where the tensors are on the CPU, so that no check waits for the device, and in
the checking mode (``GRAPHKIT_CHECK=1``).

The mask says what each node attends to, and the links which nodes may be accepted after which. If
they contradict each other, the target verifies other drafts than those that it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import DraftTree
from graphkit.engine.step.drafter import Drafter
from graphkit.errors import InputError
from graphkit.graphs import is_capturing
from graphkit.ops.argument_rules import describe

_ROUNDING = 1e-3
"""Distance from 1 that rounding explains in a sum of probabilities."""
_REMEDY = "Describe one tree in the links and the mask, as graphkit.ops.build_tree does."
_TREE_TENSORS: dict[str, tuple[str, torch.dtype]] = {
    "draft_tokens": ("[B * W]", torch.int64),
    "tree_mask": ("[B, W, W]", torch.bool),
    "retrieve_next_token": ("[B, W]", torch.int64),
    "retrieve_next_sibling": ("[B, W]", torch.int64),
    "draft_probs": ("[B * W, V]", torch.float32),
}
"""Shape and dtype of each tensor of a ``DraftTree`` that the verifier reads."""


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
        actual = "None" if tree is None else type(tree).__name__
        raise InputError(f"{method} returned {actual}, expected a DraftTree.", field="draft")
    batch_size, width, device = len(seq_lens), context.verify_width, seq_lens.device
    unread = {"tree_mask"} if context.spec.topk == 1 else set()
    if tree.draft_probs is None:
        unread.add("draft_probs")
    shapes: dict[str, tuple[int, ...]] = {
        "[B * W]": (batch_size * width,),
        "[B, W]": (batch_size, width),
        "[B, W, W]": (batch_size, width, width),
        "[B * W, V]": (batch_size * width, context.sizes.vocab_size),
    }
    for name, (dims, dtype) in _TREE_TENSORS.items():
        if name in unread:
            continue
        tensor = getattr(tree, name)
        if not isinstance(tensor, torch.Tensor):
            actual = type(tensor).__name__
            raise InputError(f"{method}: {name} is {actual}, expected a tensor.", field=name)
        shape = shapes[dims]
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


def check_links(method: str, tree: DraftTree, *, is_chain: bool) -> None:
    """Refuse links that form no tree, and a mask that contradicts them. Waits for the device.

    Nodes that the links do not reach are never accepted and not checked.

    Args:
        method: Name of the method that returned the tree, for messages.
        tree: Tensors of the right shapes.
        is_chain: Whether the verifier takes the tree for a chain and does not read its mask.

    Raises:
        InputError: A node is linked twice or out of range, or sees other nodes than itself and its
            ancestors; ``field`` names the tensor.
    """
    batch_size, width = tree.retrieve_next_token.shape
    chain = torch.ones(width, width, dtype=torch.bool).tril()
    masks = chain.expand(batch_size, -1, -1) if is_chain else tree.tree_mask.cpu()
    links = tree.retrieve_next_token.tolist(), tree.retrieve_next_sibling.tolist()
    for request, (child, sibling, mask) in enumerate(zip(*links, masks.tolist(), strict=True)):
        for node, path in _paths(method, request, child, sibling).items():
            seen = [other for other, is_visible in enumerate(mask[node]) if is_visible]
            if seen != path:
                what = "the chain has" if is_chain else f"tree_mask[{request}, {node}] shows"
                raise InputError(
                    f"{method}: the links of request {request} put node {node} at the end of the "
                    f"path {path}, but {what} {seen}. {_REMEDY}",
                    field="retrieve_next_token" if is_chain else "tree_mask",
                )


def check_probs(method: str, tree: DraftTree, draft_probs: torch.Tensor) -> None:
    """Refuse rows of nodes with children that are not distributions. Waits for the device.

    Args:
        method: Name of the method that returned the tree, for messages.
        tree: Its links.
        draft_probs: Its probabilities, [B * W, V] float32.

    Raises:
        InputError: A number is negative or NaN, or a row does not sum to 1; ``field`` is
            ``draft_probs``.
    """
    parents = (tree.retrieve_next_token.flatten() >= 0).nonzero()[:, 0]
    rows = draft_probs[parents].double()
    sums = rows.sum(1)
    is_wrong = ~((rows >= 0).all(1) & ((sums - 1).abs() < _ROUNDING))
    for row, total in zip(parents[is_wrong].tolist(), sums[is_wrong].tolist(), strict=True):
        raise InputError(
            f"{method}: draft_probs[{row}] has a sum of {total:.6g} or a number below 0, expected "
            "the probabilities that the children of the node were sampled from, such as a softmax.",
            field="draft_probs",
        )


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


def _paths(
    method: str, request: int, child: Sequence[int], sibling: Sequence[int]
) -> Mapping[int, list[int]]:
    """Return the ascending ancestors of each node that the links reach, the node included."""
    paths, to_visit = {0: [0]}, [0]
    while to_visit:
        parent = to_visit.pop()
        node, field = child[parent], "retrieve_next_token"
        while node != -1:
            if not 0 <= node < len(child) or node in paths:
                fact = "is linked twice" if node in paths else "does not exist"
                raise InputError(
                    f"{method}: {field} of request {request} contains node {node}, which {fact}. "
                    f"{_REMEDY}",
                    field=field,
                )
            paths[node] = sorted([*paths[parent], node])
            to_visit.append(node)
            node, field = sibling[node], "retrieve_next_sibling"
    return paths
