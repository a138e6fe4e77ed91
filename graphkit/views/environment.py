"""Where a record was made: device, backend and versions."""

from __future__ import annotations

from collections.abc import Iterator

from graphkit.records import Environment, RecordWithGraphs


def environment_facts(record: RecordWithGraphs) -> Iterator[tuple[str, str]]:
    """Yield the device, the backend and the versions, as far as they are known."""
    environment = record.environment
    yield "device", environment.device
    yield "backend", record.backend
    for name in ("torch", "triton", "cuda", "driver", "graphkit"):
        if getattr(environment, name):
            yield name, getattr(environment, name)


def environment_line(target: str, backend: str, environment: Environment) -> str:
    """Return the target and where it ran, such as ``tiny on cpu, recorder backend, torch 2.13``."""
    has_gpu = environment.driver and environment.device != "cpu"
    gpu = f", CUDA {environment.cuda}, driver {environment.driver}" if has_gpu else ""
    return f"{target} on {environment.device}, {backend} backend, torch {environment.torch}{gpu}"
