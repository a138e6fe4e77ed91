"""One speculative step: draft, verify, accept, catch up; captured whole, and looped on the device.

A step reads and writes ``request_state``. A drafter (``eagle``, ``multi_layer``, ``dflash``,
``ngram``) proposes tokens, the ``verifier`` runs the target over them and accepts, and
``spec_step`` joins both. ``admission`` prefills the prompt of a request before its first step.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
