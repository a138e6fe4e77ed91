"""JSON that follows a schema, from draft trees: xgrammar's matchers constrain some requests.

A ``GrammarMatcher`` is a ``graphkit.TokenMatcher``. The other requests of the batch are not
affected. Needs xgrammar; the reference model's tokens are bytes, so it needs no tokenizer.

python tools/examples/structured_output.py
"""

from __future__ import annotations

import json

import xgrammar

import graphkit as gk
from graphkit.models import reference_engine

END, PROMPT = 0, b"import json\n# "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
        "kind": {"enum": ["class", "function", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}


def compiled(schema: dict[str, object]) -> xgrammar.CompiledGrammar:
    """Compile a schema for a vocabulary of the 256 bytes; byte 0 ends a text."""
    vocabulary = xgrammar.TokenizerInfo(
        [bytes([token]) for token in range(256)],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=256,  # the target's, which may exceed the tokenizer's
        stop_token_ids=[END],
    )
    compiler = xgrammar.GrammarCompiler(vocabulary)
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)


def main() -> int:
    """Print a record for each temperature, and a text without a schema beside them."""
    grammar = compiled(SCHEMA)
    with reference_engine(
        topk=2, max_batch_size=3, max_context_len=96, batch_sizes=[3], structured_output=True
    ) as engine:
        engine.capture()
        print(f"generation {engine.plan.generation}: {engine.plan.reason}")
        constrained = [
            engine.submit(
                PROMPT,
                gk.SamplingParams(max_new_tokens=70, temperature=temperature),
                matcher=xgrammar.GrammarMatcher(grammar),  # one per request
            )
            for temperature in (0.0, 1.0)
        ]
        free = engine.submit(PROMPT, gk.SamplingParams(max_new_tokens=20))
        while engine.has_work:
            engine.step()
    for request in constrained:
        text = bytes(request.output_ids).rstrip(b"\0")
        print(f"{request.accept_length:.1f} tokens per step: {json.loads(text)}")
    print(f"without a schema: {bytes(free.output_ids)!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
