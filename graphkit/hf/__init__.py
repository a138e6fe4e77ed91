"""Causal language models of transformers over graphkit's pools, without code per architecture.

``load`` learns what a model keeps (``layout``), lets its attention (``attention``, ``pools``) and
its recurrent layers (``recurrent``) run over graphkit's pools, and checks the result.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "graphkit.hf needs transformers: pip install 'graphkit-cuda[models]'."
    ) from error

from graphkit.hf.versions import check_version

check_version(transformers.__version__)  # before imports that an old version does not have

from graphkit.hf.load import load  # noqa: E402
from graphkit.hf.model import TransformersModel  # noqa: E402
from graphkit.hf.tokenizer import FolderTokenizer  # noqa: E402

__all__ = ["FolderTokenizer", "TransformersModel", "load"]
