"""Checks of a graph whose program has registered what it computes: shadow, pads and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphkit.audit.audit_log import Check, NotChecked
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.audits.captured_numbers import Calls, noted_call
from graphkit.audit.foreign.audits.foreign_graph import ForeignGraph
from graphkit.audit.foreign.registration import Registration, named_outputs
from graphkit.audit.runs.first_node import first_node_in
from graphkit.audit.runs.forward_trace import ForwardTrace, OpObserver, trace_function
from graphkit.audit.runs.live_rows import RowPlaces, matched_rows
from graphkit.graphs.operations import storage_id
from graphkit.graphs.source_lines import node_line
from graphkit.records import Mismatch, count_of
from graphkit.records.audit import Audit
from graphkit.runners.comparison import Rounding, first_difference
from graphkit.runners.comparison.differences import Tensors, even_owner
from graphkit.runners.comparison.step_comparison import judge_graph

_FLOAT_SCALE = 8
"""Pad rows that may hold anything get the first row, its floating-point numbers times this."""
_BODY_RUNS = "the body with the pads of the program", "the body with other pads"


def check_dispatch(known: Registration, check: Check) -> None:
    """Report a graph that is replayed for a batch that it was not captured for."""
    check.text = "compared the batch with what the graph was captured for"
    live, now = known.live(), None if known.key is None else known.key()
    if known.size and not 0 <= live <= known.size:
        check.report(
            FindingKind.WRONG_GRAPH,
            f"the graph has {count_of(known.size, 'row')}, and is replayed for {live} live rows.",
            before=str(known.size),
            after=str(live),
            cause="rows",
        )
    if now != known.captured_key:
        check.report(
            FindingKind.WRONG_GRAPH,
            f"the graph was captured for {known.captured_key!r} and is replayed for {now!r}.",
            before=repr(known.captured_key),
            after=repr(now),
            cause="key",
        )


class RegisteredGraph:
    """A registered graph at one replay of the program."""

    def __init__(self, graph: ForeignGraph) -> None:
        assert graph.known is not None, "the program has registered it"
        self._graph, self._known = graph, graph.known
        size = self._known.size
        self._live = min(self._known.live(), size) if size else 0
        self._outputs = named_outputs(self._known.outputs)
        dtypes = [t.dtype for t in self._outputs.values() if t.is_floating_point()]
        self._rounding = Rounding(min(dtypes, key=lambda d: d.itemsize, default=torch.float32))

    def check_shadow(self, check: Check) -> None:
        """Compare the live rows of a replay with a run of the body from the same state."""
        replayed = self._filled(None)
        calls: list[tuple[str, tuple[Any, ...], str]] = []
        body = self._run_body(calls)
        check.text = f"compared {count_of(self._live, 'live row')} with the body"
        if first_difference(body, replayed, even_owner(1), self._rounding) is None:
            return
        requests = max(self._live, 1)
        verdict = judge_graph(body, replayed, self._run_body, requests, self._rounding)
        if not verdict.is_comparable:
            raise NotChecked("repeated runs of the body differ")
        if verdict.wrong is None:
            return
        text, place = _first_other_call(self._graph.followed.calls, calls)
        cause, sides = place.get("source", "output"), ("from the graph", "without it")
        check.report_row(
            FindingKind.GRAPH_BUG, verdict.wrong, self._live, sides, text, cause=cause, **place
        )

    def check_pads(self, check: Check) -> None:
        """Compare live rows of replays with other contents in the rows past them."""
        known, size = self._known, self._known.size
        if not self._live or self._live == size:
            check.text = "no pad rows in this replay"
            return
        contents = ("what the program left", "the declared pads", "other numbers")
        fills = (None, torch.zeros_like, _first_row)
        results = [self._filled(fill) for fill in fills]
        check.text = f"{count_of(size - self._live, 'pad row')} with three contents"
        for index, fill in enumerate(fills[1:], 1):
            wrong = self._difference(results[0], results[index], self._rounding.beside(0.0))
            kind = FindingKind.LEAKING_PAD_ROW
            if wrong is None:
                kind = kind.within_rounding
                wrong = self._difference(results[0], results[index], 0.0)
            if wrong is None:
                continue
            first, place = self._first_node(fill)
            sides = f"with {contents[index]} in pad rows", f"with {contents[0]} there"
            place |= {"cause": place.get("source", "output"), "names": tuple(known.inputs)}
            check.report_row(kind, wrong, self._live, sides, first, **place)
            return

    def _filled(self, fill: Any) -> Tensors:
        self._graph.rewind()
        self._fill(fill)
        self._graph.replay()
        return self._live_rows(self._outputs)

    def _fill(self, fill: Any) -> None:
        for tensor, axis, pad in self._known.inputs.values() if fill is not None else ():
            live = self._rows(tensor.shape[axis])
            pads = tensor.narrow(axis, live, tensor.shape[axis] - live)
            first = tensor.narrow(axis, 0, 1)
            row = fill(first) if pad is None else torch.full_like(first, pad)
            pads.copy_(row.expand_as(pads))

    def _run_body(self, calls: list[tuple[str, tuple[Any, ...], str]] | None = None) -> Tensors:
        assert self._known.body is not None, "a shadow needs a body"
        self._graph.rewind()

        def note(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any) -> None:
            if calls is not None:
                calls.append((*noted_call(op, args, kwargs), node_line()))

        with torch.no_grad(), OpObserver(note):
            outputs = named_outputs(self._known.body())
        if outputs.keys() != self._outputs.keys():
            raise NotChecked(
                f"the body returns {', '.join(outputs) or 'no tensor'}, and the registered outputs "
                f"are {', '.join(self._outputs) or 'none'}"
            )
        return self._live_rows(outputs)

    def _live_rows(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return {
            name: tensor[: self._rows(len(tensor))].clone() if tensor.dim() else tensor.reshape(1)
            for name, tensor in {**tensors, **self._graph.state()}.items()
        }

    def _rows(self, length: int) -> int:
        """Return the live ones of so many rows."""
        size = self._known.size
        return length * self._live // size if size and length % size == 0 else length

    def _difference(self, one: Tensors, other: Tensors, allowed: float) -> Mismatch | None:
        return first_difference(one, other, even_owner(self._live), self._rounding, allowed)

    def _first_node(self, fill: Any) -> tuple[str, dict[str, Any]]:
        """Return the first operation of the body whose live rows follow pads, as text and facts."""
        body, live, size = self._known.body, self._live, self._known.size
        if body is None:
            return "", {}

        def trace(its_fill: Any) -> ForwardTrace:
            traced = ForwardTrace()
            self._graph.rewind()
            self._fill(its_fill)
            with torch.no_grad():
                output = trace_function(traced, body)
            traced.outputs = {n: storage_id(t) for n, t in named_outputs(output).items()}
            return traced

        def traces(call: int) -> tuple[ForwardTrace, ForwardTrace]:
            return (ForwardTrace(), ForwardTrace()) if call else (trace(None), trace(fill))

        places = RowPlaces(range(live), range(live), size, size)
        limits = (self._rounding.most, 0.0)
        first = first_node_in(traces, matched_rows(places), self._rounding, limits)
        return ("", {}) if first is None else (first.text(_BODY_RUNS), {**first.facts})


def _first_other_call(
    captured: Calls, now: list[tuple[str, tuple[Any, ...], str]]
) -> tuple[str, dict[str, Any]]:
    """Return the first operation that the body runs otherwise than at the capture."""
    for (name, before), (other, after, source) in zip(captured, now, strict=False):
        if name != other:
            return f" The body runs `{other}` where the graph has `{name}`.", {"source": source}
        if before != after:
            text = f" `{name}` gets {list(after)} now and got {list(before)} at the capture."
            return text, {"source": source, "kernel": name}
    if len(captured) != len(now):
        return f" The body runs {len(now)} operations, and the capture had {len(captured)}.", {}
    return " Both run the same operations: memory that they read, or their code, was replaced.", {}


def _first_row(row: torch.Tensor) -> torch.Tensor:
    return row.clone() * _FLOAT_SCALE if row.is_floating_point() else row.clone()


def registered_checks(graph: ForeignGraph) -> Iterator[tuple[Audit, Callable[[Check], None]]]:
    """Yield the audits that need repeated replays of a graph, with what runs each."""
    known = graph.known
    if known is None or known.outputs is None:
        return
    if known.body is not None:
        yield Audit.SHADOW, lambda check: RegisteredGraph(graph).check_shadow(check)
    if known.inputs and known.live_rows is not None:
        yield Audit.PADS, lambda check: RegisteredGraph(graph).check_pads(check)
