"""Linear layers, with quantised weights and others, and their places in a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from graphkit.models.quantization.weight import (
    QUANTIZATIONS,
    QuantizedWeight,
    join_rows,
)
from graphkit.ops.experts import expert_linear
from graphkit.ops.linear import project
from graphkit.ops.quantized_linear import quantized_linear

SUFFIXES = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of experts that ``models.experts`` runs."""


class _Quantized(nn.Module):
    """Base of modules that hold a quantised weight as parameters."""

    weight: nn.Parameter
    scale: nn.Parameter
    zero_point: nn.Parameter | None
    row_invariant: bool = True

    def __init__(self, weight: QuantizedWeight, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.numbers, requires_grad=False)
        self.scale = nn.Parameter(weight.scale, requires_grad=False)
        self.zero_point = _constant(weight.zero_point)
        self.in_features, self.out_features = weight.in_features, out_features

    def extra_repr(self) -> str:
        """Describe the weight in the representation of its model."""
        bits = 4 if self.weight.dtype == torch.uint8 else 8
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={bits}, "
            f"scales={list(self.scale.shape[-2:])}"
        )


class QuantizedExperts(_Quantized):
    """Quantised weights of experts with scales of one shape, in the place of a parameter.

    Attributes:
        weight: Numbers, [E, N, L]; see ``QuantizedWeight``.
        scale: [E, R, C].
        zero_point: [E, R, C] uint8; ``None`` for 8.
        in_features: Inputs (K).
        row_invariant: As of ``expert_linear``.
    """

    def __init__(self, weights: Sequence[QuantizedWeight]) -> None:
        if any(each.zero_point is not None for each in weights):
            weights = [each.with_zero_points() for each in weights]
        zeros = [each.zero_point for each in weights if each.zero_point is not None]
        stacked = QuantizedWeight(
            _stacked([each.numbers for each in weights]),
            _stacked([each.scale for each in weights]),
            _stacked(zeros) if zeros else None,
            weights[0].in_features,
        )
        super().__init__(stacked, weights[0].out_features)

    def __len__(self) -> int:
        """Return the number of experts (E)."""
        return len(self.weight)

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply rows, [T, K] to [T, N], with the weight of one expert."""
        chosen = torch.full((len(rows), 1), expert, device=rows.device)
        return expert_linear(
            rows, chosen, self.weight, self.scale, self.zero_point, row_invariant=self.row_invariant
        )

    def extra_repr(self) -> str:
        """Describe the weights in the representation of their model."""
        return f"experts={len(self)}, {super().extra_repr()}"


def is_weight_of_experts(owner: nn.Module, name: str) -> bool:
    """Return whether ``models.experts`` runs a parameter of a module, with an output per row."""
    return name in SUFFIXES and getattr(owner, "is_transposed", True) is False


def replace_weight(owner: nn.Module, name: str, weight: QuantizedExperts) -> None:
    """Put quantised weights in the place of a parameter, in place."""
    delattr(owner, name)
    setattr(owner, name, weight)


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if first.itemsize > 1:
        return torch.stack([*tensors])
    # Bytes, which every device can stack.
    return torch.stack([each.view(torch.uint8) for each in tensors]).view(first.dtype)


class Linear(nn.Linear):
    """``torch.nn.Linear``, whose products run by ``graphkit::linear`` on CUDA.

    Elsewhere, and where gradients are recorded, torch multiplies. On a CPU the bits of a row depend
    on the row alone.
    """

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - the name in nn.Linear
        **result: bool,
    ) -> torch.Tensor:
        """Multiply rows, [..., K] to [..., N]; see ``graphkit.ops.linear.project``."""
        result["row_invariant"] = is_row_invariant(self)
        return project(input, self.weight, self.bias, **result)


class QuantizedLinear(_Quantized):
    """A linear layer whose weight has eight or four bits per number.

    It captures as any layer: nothing is decided on the host but by shapes. It has no gradient.

    Attributes:
        weight: ``QuantizedWeight.numbers``.
        scale: ``QuantizedWeight.scale``.
        zero_point: ``QuantizedWeight.zero_point``.
        row_invariant: As of ``quantized_linear``.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, weight.out_features)
        self.bias = _constant(bias)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight."""
        zero_point = None if self.zero_point is None else self.zero_point.data
        return QuantizedWeight(self.weight.data, self.scale.data, zero_point, self.in_features)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - the name in nn.Linear
        **result: bool,
    ) -> torch.Tensor:
        """Multiply rows, [..., K] to [..., N]; see ``graphkit.ops.linear.project``."""
        result["row_invariant"] = self.row_invariant
        return project_quantized(input, self.quantized, self.bias, **result)


def project_quantized(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    **result: bool,
) -> torch.Tensor:
    """Multiply rows with a quantised weight; see ``project`` and ``quantized_linear``."""
    rows = x.reshape(-1, weight.in_features)
    out = quantized_linear(rows, weight.numbers, weight.scale, weight.zero_point, bias, **result)
    return out.view(*out.shape[:-2], *x.shape[:-1], out.shape[-1])


def merge_quantized(layers: Sequence[QuantizedLinear]) -> None:
    """Let layers of one kind of weight, all or none with a bias, share memory side by side.

    Their parameters become views of it, so that modules that share them see it.
    """
    weight = QuantizedWeight.join([layer.quantized for layer in layers])
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    bias, end = join_rows(biases) if biases else None, 0
    for layer in layers:
        begin, end = end, end + layer.out_features
        part = weight.part(begin, end)
        layer.weight.data, layer.scale.data = part.numbers, part.scale
        if layer.zero_point is None:
            layer.zero_point = _constant(part.zero_point)
        elif part.zero_point is not None:
            layer.zero_point.data = part.zero_point
        if layer.bias is not None and bias is not None:
            layer.bias.data = bias[begin:end]


def quantize_linears(
    module: nn.Module,
    quantization: str,
    *,
    device: torch.device | str | None = None,
    kept: Collection[nn.Module] = (),
) -> int:
    """Replace the linear layers and the experts in a module, in place, by quantised ones.

    A layer is replaced if its class computes as ``nn.Linear`` does; experts, if ``models.experts``
    runs them and an expert has a row per output. One layer at a time is held twice. A layer that
    occurs at several places is quantised once.

    Args:
        module: The module.
        quantization: A name of ``QUANTIZATIONS``.
        device: Where to quantise, and where the new layers are; ``None`` for the device of each
            layer.
        kept: Layers that stay as they are, such as the output head.

    Returns:
        The number of quantised layers, the weights of all experts of a module among them.
    """
    quantize = QUANTIZATIONS[quantization]
    done = dict[nn.Module, QuantizedLinear]()
    for owner in list(module.modules()):
        for name, layer in list(owner.named_children()):
            if not isinstance(layer, nn.Linear) or layer in kept:
                continue
            if type(layer).forward not in (nn.Linear.forward, Linear.forward):
                continue
            if layer not in done:
                bias: torch.Tensor | None = layer.bias
                moved = None if bias is None else bias.data.to(device)
                weight = quantize(layer.weight.data.to(device))
                done[layer] = QuantizedLinear(weight, moved).train(layer.training)
                keep_hooks(layer, done[layer])
            setattr(owner, name, done[layer])
    count = len(done)
    for owner in list(module.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if is_weight_of_experts(owner, name):
                held = [quantize(each.to(device)) for each in parameter.data]
                replace_weight(owner, name, QuantizedExperts(held))
                count += 1
    return count


def set_row_invariant(module: nn.Module, row_invariant: bool) -> None:
    """Set ``row_invariant`` of the linear layers and experts in a module."""
    for layer in module.modules():
        is_product = isinstance(layer, nn.Linear | QuantizedLinear | QuantizedExperts)
        if is_product or hasattr(layer, "is_transposed"):  # experts of transformers
            layer.row_invariant = row_invariant  # type: ignore[assignment]


def is_row_invariant(layer: nn.Module) -> bool:
    """Return ``row_invariant`` of a layer, True if ``set_row_invariant`` has not set it."""
    return bool(getattr(layer, "row_invariant", True))


def keep_hooks(layer: nn.Module, other: nn.Module) -> None:
    """Let a layer that replaces another have its forward hooks, such as those of ranks."""
    other._forward_pre_hooks.update(layer._forward_pre_hooks)
    other._forward_hooks.update(layer._forward_hooks)


def _constant(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
