"""Programs that capture CUDA graphs without graphkit: transformers and ``torch.compile``.

Each is the text of a script that prints what it computes. They are small, run on a CPU as well,
where they capture nothing, and need no network. ``batching`` returns copies with a planted fault.
"""

from __future__ import annotations

MODEL = """
import dataclasses, time
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    pad_token_id=0, eos_token_id=None, bos_token_id=1,
)).eval().to(device)
prompts = [[5, 9, 3, 7, 11], [8, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
"""

_BATCHING = """
from transformers import ContinuousBatchingConfig

class State:
    pass

state = State()
{before}
wanted = dict(
    page_size=16, num_blocks=16, max_batch_tokens=32, max_requests_per_batch=4,
    allow_block_sharing=False, use_cuda_graph=True, use_async_batching=False,
    auto_switch_to_flash=False,
)
known = {{field.name for field in dataclasses.fields(ContinuousBatchingConfig)}}
manager = model.init_continuous_batching(
    generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1),
    continuous_batching_config=ContinuousBatchingConfig(
        **{{name: value for name, value in wanted.items() if name in known}}
    ),
)
manager.warmup()
manager.start()

def generate():
    manager.add_requests(inputs=prompts[:{requests}], max_new_tokens=8)
    texts, end = {{}}, time.monotonic() + 60
    while len(texts) < {requests} and manager.is_running() and time.monotonic() < end:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            texts[result.request_id] = result.generated_tokens
    for name, tokens in sorted(texts.items()):
        print(name, tokens, flush=True)

generate()
{after}
generate()
manager.stop(block=True, timeout=5)
"""

GENERATE = (
    MODEL
    + """
inputs = torch.tensor([[5, 9, 3, 7], [8, 4, 6, 2]], device=device)
config = GenerationConfig(max_new_tokens=8, do_sample=False, cache_implementation="static")
for _ in range(2):
    print(model.generate(inputs, generation_config=config).tolist())
"""
)

COMPILED = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(self.norm(x)))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (each.view(2, 8, 4, 16).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(2, 8, 64))

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        self.total.add_(x.sum((0, 1)))
        return self.layer(x) + self.total

for model in (Gated(), Attention(), Counter()):
    compiled = torch.compile(model.to(device), mode="reduce-overhead")
    with torch.no_grad():
        for number in range(5):
            x = torch.full((2, 8, 64), number + 1.0, device=device)
            print(compiled(x).double().sum().item())
"""

TREES = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
first, second = nn.Linear(64, 64).to(device), nn.Linear(64, 64).to(device)

@torch.compile(mode="reduce-overhead", dynamic=False)
def step(x, is_wide):
    y = first(x).relu()
    torch._dynamo.graph_break()  # the tree has a node below the first graph's
    return second(y) * 2 if is_wide else second(y)

optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for number in range(12):  # a path of the tree warms up, is captured, and is replayed then
    x = torch.full((4 if number % 2 else 8, 64), 0.1 * number, device=device)
    with torch.no_grad():
        kept = step(x, number % 3 == 0).clone()
    loss = step(x, False).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(kept.double().sum().item(), loss.item())
"""

_SCALE = """
state.scale = torch.ones(1, 1, 128, device=device)

def multiply(module, inputs, output):
    if state.scale is not None:
        return output * state.scale  # multiplies

model.lm_head.register_forward_hook(multiply)
"""

_STALE = """
def read(module, inputs, output):
    last = torch.empty_like(output)  # never filled
    out = output + last
    last.copy_(out)
    return out

model.model.embed_tokens.register_forward_hook(read)  # before the keys and values are written
"""

_INDEX = """
state.table = torch.zeros(16, 128, device=device)
state.rows = torch.zeros(1, dtype=torch.int64, device=device)

def select(module, inputs, output):
    return output + state.table.index_select(0, state.rows)  # selects

model.lm_head.register_forward_hook(select)
"""

_POOL = """
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    state.scale = torch.ones(1, 1, 128, device=device)

def multiply(module, inputs, output):
    if state.scale is not None:
        return output * state.scale  # multiplies

model.lm_head.register_forward_hook(multiply)
"""

_SLEEP = """
import graphkit as gk

before = gk.fingerprint()
assert gk.compare_fingerprint(before) == ()
model.lm_head.weight.data.zero_()
for each in gk.compare_fingerprint(before):
    print(each.severity, each.kind, each.name)
"""

FAULTS: dict[str, tuple[str, str]] = {
    "freed input": (_SCALE, "state.scale = None"),
    "replaced static tensor": (
        _SCALE, "state.scale = torch.full((1, 1, 128), 2.0, device=device)",
    ),
    "stale pool read": (_STALE, ""),
    "dropped pool": (_POOL, "state.scale = None\ndel pool\ntorch.cuda.empty_cache()"),
    "weight zeroed in sleep": ("", _SLEEP),
    "index out of range": (_INDEX, "state.rows.fill_(1_000_000_000)"),
}  # fmt: skip
"""Code before the captures of ``batching`` and after its first requests, by fault."""


def batching(fault: str = "") -> str:
    """Return continuous batching of transformers, with a planted fault or without one."""
    before, after = FAULTS.get(fault, ("", ""))
    # One request at a time has the same replays in every run.
    return MODEL + _BATCHING.format(before=before, after=after, requests=1 if fault else 3)


SOUND = {
    "continuous batching": batching(),
    "generate with a static cache": GENERATE,
    "three compiled models": COMPILED,
    "cudagraph trees": TREES,
}
