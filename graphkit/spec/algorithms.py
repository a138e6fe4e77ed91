"""The interface of a speculative algorithm, the built-in ones, and those registered by name."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import TYPE_CHECKING

from graphkit.config import require_type
from graphkit.errors import ConfigError, short_repr
from graphkit.spec.signatures import call_override, signature_mismatch

if TYPE_CHECKING:
    import torch

    from graphkit.spec.future_map import FutureMap


class _AlgorithmInterface:
    """The methods of an algorithm that runners and engines call. All may be overridden."""

    def is_none(self) -> bool:
        """Return whether the algorithm is plain decoding."""
        return False

    def is_eagle(self) -> bool:
        """Return whether a draft head reads the target's hidden states: EAGLE and EAGLE3."""
        return False

    def is_eagle3(self) -> bool:
        """Return whether the draft head reads several target layers, as in EAGLE3."""
        return False

    def is_standalone(self) -> bool:
        """Return whether drafts come from a standalone draft model."""
        return False

    def is_dflash(self) -> bool:
        """Return whether the draft model fills a block in one forward."""
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Return whether a draft worker may capture TARGET_VERIFY."""
        return self.is_dflash()

    def get_num_tokens_per_bs_for_target_verify(
        self,
        num_draft_tokens: int,
        is_draft_worker: bool,  # noqa: ARG002 - for algorithms whose two sides differ
    ) -> int:
        """Return the rows per request in TARGET_VERIFY; by default the whole draft tree."""
        return num_draft_tokens

    def create_future_map(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: torch.device | str,
    ) -> FutureMap:
        """Create the ``FutureMap`` that keeps one step's results for the next.

        Arguments and errors are those of ``FutureMap``.
        """
        from graphkit.spec.future_map import FutureMap

        return FutureMap(max_running_requests, chunked_prefill_size, context_len, device, self)


class SpecAlgorithm(_AlgorithmInterface, Enum):
    """The algorithms that graphkit knows by name."""

    NONE = "NONE"
    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"
    DFLASH = "DFLASH"

    def is_none(self) -> bool:
        """Return whether this is NONE."""
        return self is SpecAlgorithm.NONE

    def is_eagle(self) -> bool:
        """Return whether this is EAGLE or EAGLE3."""
        return self in (SpecAlgorithm.EAGLE, SpecAlgorithm.EAGLE3)

    def is_eagle3(self) -> bool:
        """Return whether this is EAGLE3."""
        return self is SpecAlgorithm.EAGLE3

    def is_standalone(self) -> bool:
        """Return whether this is STANDALONE."""
        return self is SpecAlgorithm.STANDALONE

    def is_dflash(self) -> bool:
        """Return whether this is DFLASH."""
        return self is SpecAlgorithm.DFLASH


class CustomSpecAlgorithm(_AlgorithmInterface):
    """Base of custom algorithms; register one with ``register_algorithm(name, cls)``.

    Attributes:
        name: Name that it is registered under.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


Algorithm = SpecAlgorithm | CustomSpecAlgorithm
"""A built-in algorithm, or an instance of a registered class."""

INTERFACE = tuple(name for name in vars(_AlgorithmInterface) if not name.startswith("_"))
"""Every method that a registered class must have."""
PREDICATES = tuple(name for name in INTERFACE if name.startswith(("is_", "supports_")))
"""The methods of ``INTERFACE`` that return a bool."""


_ALIASES = {"NEXTN": SpecAlgorithm.EAGLE}
_custom: dict[str, CustomSpecAlgorithm] = {}


def algorithm_names() -> tuple[str, ...]:
    """Return every name that ``get_algorithm`` knows, aliases included."""
    return (*SpecAlgorithm.__members__, *_ALIASES, *_custom)


def register_algorithm(name: str, cls: type[CustomSpecAlgorithm]) -> None:
    """Make ``cls(name)`` available as ``SpecConfig(algorithm=name)``.

    Args:
        name: Name, in any case.
        cls: A class with the whole interface, such as a subclass of ``CustomSpecAlgorithm``.

    Raises:
        ConfigError: The name is taken, ``cls(name)`` cannot be called, or ``cls`` lacks methods of
            the interface, which the message lists, or has one with other parameters.
    """
    if type(name) is not str or not name:
        raise ConfigError(f"algorithm name must be text, got {short_repr(name)}.", field="name")
    if not inspect.isclass(cls):
        raise ConfigError(f"algorithm class must be a class, got {short_repr(cls)}.", field="cls")
    key = name.upper()
    if key in algorithm_names():
        raise ConfigError(
            f"algorithm name {short_repr(name)} is taken; names in use: "
            f"{', '.join(algorithm_names())}.",
            field="name",
        )
    missing = _missing(cls)
    if missing:
        raise ConfigError(
            f"algorithm class {cls.__name__} lacks {', '.join(missing)}. "
            "Derive it from graphkit.CustomSpecAlgorithm, which defines all of them.",
            field="cls",
        )
    try:
        inspect.signature(cls).bind(key)
    except TypeError as error:
        raise ConfigError(
            f"algorithm class {cls.__name__} is called as {cls.__name__}({short_repr(key)}): "
            f"{error}. Give "
            "its __init__ one parameter, the name.",
            field="cls",
        ) from error
    except ValueError:  # a class without a signature
        pass
    try:
        algorithm = cls(key)
    except Exception as error:
        raise ConfigError(
            f"{cls.__name__}({short_repr(key)}) raised {type(error).__name__}: {error}. Register a "
            "class that can be called with the name alone, such as a subclass of "
            "graphkit.CustomSpecAlgorithm.",
            field="cls",
        ) from error
    check_methods(algorithm, "cls")
    _custom[key] = algorithm


def get_algorithm(name: object) -> Algorithm:
    """Return the algorithm of that name, or ``name`` itself if it is an algorithm.

    Raises:
        ConfigError: The name is not registered, or ``name`` is neither a name nor an algorithm.
    """
    if isinstance(name, (SpecAlgorithm, CustomSpecAlgorithm)):
        return name
    if not isinstance(name, (str, type)) and not _missing(name):
        return name  # type: ignore[return-value]  # a class need not derive from ours
    if not isinstance(name, str):
        raise ConfigError(
            f"algorithm must be a name or an algorithm, got {short_repr(name)}.", field="algorithm"
        )
    key = name.upper()
    if key in SpecAlgorithm.__members__:
        return SpecAlgorithm[key]
    algorithm = _ALIASES.get(key) or _custom.get(key)
    if algorithm is None:
        raise ConfigError(
            f"unknown algorithm {short_repr(name)}; known are {', '.join(algorithm_names())}. "
            "Register a custom one with graphkit.register_algorithm(name, cls).",
            field="algorithm",
        )
    return algorithm


def check_methods(algorithm: Algorithm, field: str = "algorithm") -> None:
    """Check that every method of an algorithm can be called, and that predicates return bools.

    Raises:
        ConfigError: A method has other parameters or raised an exception, or a predicate returned
            something other than a bool; ``field`` is the setting to name.
    """
    if isinstance(algorithm, SpecAlgorithm):
        return
    for name in INTERFACE:
        if mismatch := signature_mismatch(algorithm, name, CustomSpecAlgorithm):
            raise ConfigError(mismatch, field=field)
    for name in PREDICATES:
        answer = call_override(algorithm, name, field=field)
        require_type(type(algorithm).__name__, f"{name}()", answer, bool, "True or False")


def _missing(algorithm: object) -> list[str]:
    """Return the methods of the interface that an object or a class lacks."""
    return [method for method in INTERFACE if not callable(getattr(algorithm, method, None))]
