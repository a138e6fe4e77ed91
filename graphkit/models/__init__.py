"""Causal language models of transformers over graphkit's pools, without code per architecture.

``load`` learns what a model keeps (``layout``), lets its attention (``attention``, ``pools``) and
its recurrent layers (``recurrent``) run over graphkit's pools, and checks the result.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkit.models.loader import load
    from graphkit.models.model import TransformersModel
    from graphkit.models.tokenizer import FolderTokenizer

_MODULES = {"FolderTokenizer": "tokenizer", "TransformersModel": "model", "load": "loader"}

__all__ = ["FolderTokenizer", "TransformersModel", "load"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'graphkit.models' has no attribute {name!r}")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "graphkit.models needs transformers: pip install 'graphkit-cuda[models]'."
        ) from error
    from graphkit.models.versions import check_version

    check_version(transformers.__version__)  # before imports that an old version does not have
    return getattr(import_module(f"graphkit.models.{_MODULES[name]}"), name)
