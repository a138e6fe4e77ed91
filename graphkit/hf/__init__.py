"""Causal language models of transformers over graphkit's pools, without code per architecture.

``load`` learns what a model keeps (``layout``), lets its attention (``attention``, ``pools``) and
its recurrent layers (``recurrent``) run over graphkit's pools, and checks the result.
"""

try:
    import transformers  # noqa: F401 - says what to install
except ImportError as error:
    raise ImportError(
        "graphkit.hf needs transformers 5: pip install 'graphkit-cuda[models]'."
    ) from error

from graphkit.hf.load import load
from graphkit.hf.model import TransformersModel
from graphkit.hf.tokenizer import FolderTokenizer

__all__ = ["FolderTokenizer", "TransformersModel", "load"]
