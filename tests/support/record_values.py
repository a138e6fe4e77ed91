"""Random records of any kind, drawn from their declarations."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from graphkit.records import ForeignRecord, GraphRecord
from graphkit.records.record import Count, Duration, Integer, Real, record_kinds

KINDS = dict(sorted(record_kinds().items()))
"""Classes of records by kind."""
TEXT = st.text(max_size=4)
_NUMBERS = {
    Count: st.integers(0, 2**63 - 1),
    Integer: st.integers(-(2**63), 2**63 - 1),
    Duration: st.floats(0, allow_infinity=False),
    Real: st.floats(allow_nan=False),
}


@cache  # hypothesis checks every new strategy
def values_of(declared: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is Annotated:
        return _NUMBERS[declared]
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(*map(values_of, arguments), max_size=2)
    if dataclasses.is_dataclass(declared):
        return records_of(declared)
    return {str: TEXT, bool: st.booleans(), type(None): st.none()}[declared]


@cache
def records_of(kind: Any) -> st.SearchStrategy[Any]:
    """Dataclasses of a type; NaN is left out, so that equal ones compare equal."""
    hints = get_type_hints(kind, include_extras=True)
    declared = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values = {name: st.deferred(lambda t=hint: values_of(t)) for name, hint in declared.items()}
    return st.builds(kind, **values).map(_with_valid_indices)


def _with_valid_indices(record: Any) -> Any:
    """Return a record whose indices, drawn at random before, refer to what it contains."""
    if isinstance(record, ForeignRecord):
        last = len(record.processes) - 1
        graphs = [dataclasses.replace(g, process=min(g.process, last)) for g in record.graphs]
        return dataclasses.replace(record, graphs=tuple(graphs) if last >= 0 else ())
    if not isinstance(record, GraphRecord):
        return record
    nodes = [
        dataclasses.replace(node, index=index, parent=0 if index and node.parent else None)
        for index, node in enumerate(record.nodes)
    ]
    edges = [dataclasses.replace(e, source=0, target=1) for e in record.edges if len(nodes) > 1]
    timing = record.timing and dataclasses.replace(
        record.timing, critical_path=tuple(range(len(nodes)))
    )
    return dataclasses.replace(record, nodes=tuple(nodes), edges=tuple(edges), timing=timing)
