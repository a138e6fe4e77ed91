"""Causal language models of transformers over graphkit's pools, without code per architecture.

``load`` learns what a model keeps (``layout``), lets its attention (``attention``, ``pools``) and
its recurrent layers (``recurrent``) run over graphkit's pools, and checks the result.
"""

from graphkit.hf.load import load
from graphkit.hf.model import TransformersModel

__all__ = ["TransformersModel", "load"]
