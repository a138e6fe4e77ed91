"""Causal language models of transformers over graphkit's pools, without code per architecture.

``load`` learns what a model keeps (``layout``), lets its attention (``forward``, ``pools``) and
its recurrent layers (``recurrent``) run over graphkit's pools, and checks the result.
"""

from typing import Any

from graphkit.lazy_names import public_names

_load, __dir__, __all__ = public_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        try:
            import transformers
        except ImportError as error:
            raise ImportError(
                "graphkit.models needs transformers: pip install 'graphkit-cuda[models]'."
            ) from error
        from graphkit.models.versions import check_version

        check_version(transformers.__version__)  # before imports that an old version does not have
    return _load(name)
