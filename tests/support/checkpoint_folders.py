"""Small random checkpoint folders with tokenizers, as transformers writes them."""

from __future__ import annotations

import json

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

KINDS = ("qwen3", "mistral", "qwen3_moe", "qwen3_next")
"""Model types: dense, with windows, with experts, and with recurrent layers."""
TEXT = """\
The verifier reads the drafts of every request and keeps the longest path that the target has too.
Rejected drafts leave no trace: their slots are freed, and the next step starts behind the bonus.
日本語の文章 и русский текст, ça va très bien, naïve café 🙂🙃 — and the rest of the line.
def step(self, batch): return [self.run(request) for request in batch if not request.is_finished]
"""
CHAT_TEMPLATE = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {{- '[' + message['role'] + '] ' + message['content'] + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}{%- endif %}"
)
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def byte_level_tokenizer(vocab_size=320):
    """Train a byte-level BPE, as Llama 3 and Qwen have; texts start with ``<s>``."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return _starting_with_bos(tokenizer)


def byte_fallback_tokenizer(vocab_size=320):
    """Train a BPE with words that start with ``▁`` and 256 byte tokens, as Llama 2 has."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"),
    ])  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    words = (word for line in TEXT.splitlines() for word in line.split() if word.isascii())
    tokenizer.train_from_iterator(words, trainer)
    state = json.loads(tokenizer.to_str())
    state["model"]["byte_fallback"] = True
    vocab = state["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return _starting_with_bos(tokenizer)


def write_checkpoint(folder, kind, tokenizer=None):
    """Write a random model of a type with a tokenizer; return the model, in float32.

    It never generates the tokens of single bytes that ``byte_fallback_tokenizer`` has, because a
    run of them is hardly ever UTF-8.
    """
    from small_models import small_model

    tokenizer = tokenizer or byte_level_tokenizer()
    size = tokenizer.get_vocab_size()
    model = small_model(kind, vocab_size=size, tie_word_embeddings=False)
    for token, row in tokenizer.get_vocab().items():
        if token.startswith("<0x"):
            model.lm_head.weight[row] = 0
    model.save_pretrained(folder, max_shard_size="100KB")
    write_tokenizer(folder, tokenizer)
    return model


def write_tokenizer(folder, tokenizer):
    """Write a tokenizer with a chat template."""
    import transformers

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_eagle_head(folder, checkpoint):
    """Write a random EAGLE head for the target in a checkpoint folder."""
    from training.folders import save_draft_head

    from graphkit.models.heads.eagle import EagleHead

    torch.manual_seed(9)
    head = EagleHead(*_parts_of_heads(checkpoint))
    for parameter in head.parameters():
        parameter.data.normal_(0.0, 0.3)
    save_draft_head(head, folder)


def write_eagle3_head(folder, checkpoint, draft_vocab_size=96):
    """Write a random EAGLE-3 head for the target in a checkpoint folder."""
    from training.folders import save_draft_head

    from graphkit.models.heads.eagle import Eagle3Head

    torch.manual_seed(9)
    config, target = _parts_of_heads(checkpoint)
    head = Eagle3Head(config, target, aux_layers=(0, 1, 2), draft_vocab_size=draft_vocab_size)
    for name, parameter in head.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    tokens = torch.randperm(config.vocab_size)[:draft_vocab_size].sort().values
    head.d2t.copy_(tokens - torch.arange(draft_vocab_size))
    save_draft_head(head, folder)


def _parts_of_heads(checkpoint):
    """Return the configuration of a head for the target in a folder, and what it shares."""
    from transformers import LlamaConfig

    from graphkit import models
    from graphkit.models.heads.load import head_sources

    loaded = models.load(checkpoint, device="cpu", check=False)
    target = head_sources(loaded.model, loaded.layout)
    config = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    return config, target


def greedy_ids(model, prompt_ids, max_new_tokens):
    """Return the new tokens of transformers' own greedy decoding."""
    ids = torch.tensor([prompt_ids], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt_ids) :].tolist()


def continuation(tokenizer, prompt_ids, new_ids):
    """Return the text of new tokens behind their prompt."""
    prompt, whole = (tokenizer.decode(ids) for ids in (prompt_ids, prompt_ids + new_ids))
    assert whole.startswith(prompt)
    return whole[len(prompt) :]


def _starting_with_bos(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
