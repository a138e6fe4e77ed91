"""CUDA graphs for every forward mode of speculative decoding, around a model forward you wrote.

Public names load on first use, so that ``import graphkit`` and ``graphkit --help`` do not import
torch. ``__init__.pyi`` lists them by subject.
"""

import logging
from importlib import import_module
from typing import Any

from graphkit.lazy_names import public_names
from graphkit.version import __version__ as __version__

# A library logs nothing by itself: the program configures handlers.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_load, __dir__, __all__ = public_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    rooms = {"models": "graphkit.models", "foreign": "graphkit.audit.foreign"}
    return import_module(rooms[name]) if name in rooms else _load(name)
