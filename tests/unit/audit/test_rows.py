"""The audit of rows: bits that depend on the number of rows, their places, chunks and drafts."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphkit as gk
from graphkit.audit import AUDITS, audit_target
from graphkit.audit.bits import same_bits
from graphkit.audit.locate_target import locate
from graphkit.audit.rows.known_rows import KnownRows
from small_llama import SIZES

ROOT = Path(gk.__file__).parents[1]
SETTINGS = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Change to the folder in which the examples can be imported."""
    monkeypatch.chdir(ROOT)


class RowWise(nn.Linear):
    """A linear layer whose sums are exact, but for a planted error.

    It splits the sum of a row where ``splits`` says so of the rows [T, K] of a call. A buffer keeps
    the fusion of a load from replacing it.
    """

    def __init__(self, linear, splits=lambda rows: False):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.splits = linear.weight, splits
        self.register_buffer("own", torch.zeros(()))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).double()
        if self.splits(rows):
            columns, weights = rows.chunk(2, 1), self.weight.double().chunk(2, 1)
            parts = [
                (part @ own.t()).to(x.dtype) for part, own in zip(columns, weights, strict=True)
            ]
            return sum(parts).view(*x.shape[:-1], -1)
        return (rows @ self.weight.double().t()).to(x.dtype).view(*x.shape[:-1], -1)


def row_wise(model, path="", splits=None):
    """Replace every linear layer of a model; the one at a path splits sums."""
    for name, module in [*model.named_modules()]:
        for child, linear in [*module.named_children()]:
            if isinstance(linear, nn.Linear):
                is_planted = splits is not None and f"{name}.{child}" == path
                setattr(module, child, RowWise(linear, splits) if is_planted else RowWise(linear))


def llama(dtype, path="", splits=None):
    """Return a loaded Llama with exact sums in its linear layers; one of them may split sums."""
    sizes = {**SIZES, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(0))
    row_wise(model, path, splits)
    return gk.models.load(model, device="cpu", dtype=dtype, check=False)


def rows_report(target, **options):
    return audit_target(target, only=["rows"], device="cpu", **options)


PLANTED = "model.layers.1.mlp.down_proj"


def test_exact_sums_have_equal_bits():
    report = rows_report(llama(torch.bfloat16).target(**SETTINGS))
    assert not report.findings
    (verify,) = [check for check in report.checks if check.mode == "TARGET_VERIFY"]
    assert int(verify.text.split()[0].replace(",", "")) > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "text"),
    [
        (lambda rows: len(rows) > 12, "among 3 requests"),
        (lambda rows: len(rows) == 1, "in a prefill of 1 tokens"),
        (lambda rows: len(rows) == 7, "in a prefill of 7 tokens"),
        (lambda rows: len(rows) in (6, 12), "among 3 requests"),  # one or two trees
        (lambda rows: len(rows) == 85, "in a prefill of 64 and 21 tokens"),
    ],
)
def test_a_linear_that_splits_by_the_number_of_rows_is_named(splits, text):
    target = llama(torch.bfloat16, PLANTED, splits).target(**SETTINGS)
    report = rows_report(target, modes=[gk.ForwardMode.TARGET_VERIFY])
    (finding,) = report.findings
    assert finding.severity == "error"
    assert finding.kind == "rounding depends on other rows"
    assert finding.module.endswith(PLANTED)
    assert "test_rows.py" in finding.source
    assert finding.kernel
    assert text in finding.text


class LeftLinear(nn.Module):
    """A linear layer that a load leaves to torch: its weight [K, N] is transposed."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())

    def forward(self, x):
        return x @ self.weight


@pytest.mark.gpu
def test_a_product_of_cublas_is_named():
    """On an H200 its sums of 64 rows are divided in another way than those of 1 to 48."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=4096, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    attention = model.model.layers[0].self_attn
    attention.o_proj = LeftLinear(attention.o_proj)
    loaded = gk.models.load(model, row_invariant=True, check=False)
    assert "o_proj" in " ".join(loaded.row_dependences())
    report = audit_target(loaded.target(**SETTINGS), only=["rows"], device="cuda")
    assert report.findings, (loaded.row_dependences(), report.checks)
    finding = report.findings[0]
    assert finding.kind == "rounding depends on other rows"
    assert finding.module.endswith("model.layers.0.self_attn.o_proj")
    assert finding.kernel
    assert "test_rows.py" in finding.source


CHAINS = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}


class PackedSteps:
    """A forward that says during a packed step that it runs one, and counts them."""

    def __init__(self, forward):
        self.forward, self.is_packed, self.count = forward, False, 0

    def __call__(self, inputs):
        self.is_packed = bool(inputs.packs_nodes)
        self.count += self.is_packed
        output = self.forward(inputs)
        self.is_packed = False
        return output


class LeakingRows(nn.Module):
    """Adds the row before to each row of its result in packed steps."""

    def __init__(self, module, steps):
        super().__init__()
        self.module, self._steps = module, [steps]  # in a list: it has this module

    def forward(self, *args):
        out = self.module(*args)
        if not self._steps[0].is_packed:
            return out
        rows = out.flatten(0, -2)
        return (rows + nn.functional.pad(rows, (0, 0, 1, -1))).view_as(out)


def chains_target():
    """Return a target of chains, and its forward of TARGET_VERIFY."""
    target = llama(torch.bfloat16).target(**CHAINS)
    mode = gk.ForwardMode.TARGET_VERIFY
    steps = PackedSteps(target.forwards[mode])
    return dataclasses.replace(target, forwards={**target.forwards, mode: steps}), steps


def test_rows_of_packed_steps_are_compared_with_decode_rows(monkeypatch):
    compared = Counter()
    difference = KnownRows.difference

    def count(known, run, output):
        before = known.num_compared
        found = difference(known, run, output)
        compared[run.text] += known.num_compared - before
        return found

    monkeypatch.setattr(KnownRows, "difference", count)
    target, steps = chains_target()
    assert not rows_report(target).findings
    packed = {text: rows for text, rows in compared.items() if "packed" in text}
    assert len(packed) == steps.count == 10
    assert packed["in 4 and 1 packed rows of requests [1, 0]"] == 5  # pads are not compared
    assert packed["in 2 packed rows of requests [1]"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", ["self_attn.v_proj", "post_attention_layernorm"])
def test_a_module_that_mixes_rows_of_packed_steps_is_named(path):
    target, steps = chains_target()
    layer = target.weights.get_submodule("model.layers.1")
    layer.set_submodule(path, LeakingRows(layer.get_submodule(path), steps))
    (finding,) = rows_report(target).findings
    assert finding.mode == "TARGET_VERIFY"
    assert f"layers.1.{path}" in finding.module
    assert "packed rows of requests" in finding.text


class PaddedRows(RowWise):
    """Adds rows of zeros before the product, as kernels of fixed shapes do."""

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        padded = nn.functional.pad(rows, (0, 0, 0, 5 + -len(rows) % 8))
        return super().forward(padded)[: len(rows)].view(*x.shape[:-1], -1)


def test_pads_behind_the_rows_of_a_product_are_not_named():
    linear = nn.Linear(16, 32)
    target = locate("tools.examples.broken.sound:target", "cpu")
    (model,) = target.forwards.values()
    model.head = PaddedRows(linear.requires_grad_(False), lambda rows: len(rows) < 20)
    (finding,) = rows_report(target).findings
    assert finding.kernel not in ("constant_pad_nd", "pad")
    assert "test_rows.py" in finding.source


def test_a_mode_without_texts_says_so():
    target = locate("tools.examples.broken.sound:target", "cpu")
    (check,) = rows_report(target).checks
    assert "KV slots of its requests are unknown" in check.text


def test_rows_that_depend_on_their_place_are_named():
    target = locate("tools.examples.broken.batch_size_branch:target", "cpu")
    (finding,) = rows_report(target).findings
    assert finding.kind == "dependence on the batch size"
    assert "batch_size_branch.py" in finding.source


def test_random_numbers_by_row_are_not_compared():
    target = locate("tools.examples.broken.active_dropout:target", "cpu")
    report = rows_report(target)
    assert not report.findings
    assert "draws random numbers" in report.checks[0].text


def test_rows_run_only_if_they_are_named():
    target = locate("tools.examples.broken.sound:target", "cpu")
    names = {check.audit for check in audit_target(target, device="cpu").checks}
    assert "rows" in AUDITS
    assert "rows" not in names


def test_signed_zeros_have_other_bits():
    zeros = torch.tensor([0.0]), torch.tensor([-0.0])
    assert not same_bits(*zeros)
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(zeros[0], zeros[0].double())


def test_a_watch_reports_other_bits_as_a_note():
    target = locate("tools.examples.broken.split_sum:target", "cpu")
    found = []
    for options in ({}, {"equal_bits": True}):
        with target.runner(gk.ForwardMode.TARGET_VERIFY, device="cpu") as runner:
            runner.capture()
            with gk.ShadowWatch(runner, every=1, **options) as watch:
                runner.replay(target.batch(runner.mode, 1, 0))
            found.append([(finding.severity, finding.kind) for finding in watch.findings])
    assert found == [[], [("note", "rounding depends on other rows")]]
