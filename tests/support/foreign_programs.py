"""Programs that capture CUDA graphs without graphkit: transformers and ``torch.compile``.

Each is the text of a script that prints what it computes. They are small, run on a CPU as well,
where they capture nothing, and need no network. ``batching`` returns copies with a planted fault.
These also print whether the fault is there, and whether graphs captured before it are replayed.
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
try:
    generate()
finally:
    {end}
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

_COUNT = """
from torch.multiprocessing.reductions import StorageWeakRef

captured, replayed = set(), []
end_capture, replay = torch.cuda.CUDAGraph.capture_end, torch.cuda.CUDAGraph.replay

def counted_capture(graph):
    end_capture(graph)
    captured.add(id(graph))

def counted_replay(graph):
    replayed.append(id(graph))
    replay(graph)

torch.cuda.CUDAGraph.capture_end, torch.cuda.CUDAGraph.replay = counted_capture, counted_replay
"""

_PLANT = """
before_it, is_planted = captured.copy(), {is_planted}
replayed.clear()

def count_replays():
    again = sum(each in before_it for each in replayed)
    print("planted:", is_planted, again, "of", len(replayed), "replays are of earlier graphs",
          flush=True)
"""

_SCALE = """
state.scale = torch.ones(1, 1, 128, device=device)
state.address = state.scale.data_ptr()
state.memory = StorageWeakRef(state.scale.untyped_storage())

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
    state.has_read = True
    return out

model.model.embed_tokens.register_forward_hook(read)  # before the keys and values are written
"""

_TEMPERATURE = """
state.temperature = 1.0

def divide(module, inputs, output):
    return output / state.temperature  # divides

model.lm_head.register_forward_hook(divide)
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
state.address = state.scale.data_ptr()

def multiply(module, inputs, output):
    if state.scale is not None:
        return output * state.scale  # multiplies

model.lm_head.register_forward_hook(multiply)
"""

_SLEEP = """
import graphkit as gk

before = gk.graph_digest()
assert gk.compare_digest(before) == ()
model.lm_head.weight.data.zero_()
for each in gk.compare_digest(before):
    print(each.severity, each.kind, *each.names)
"""

_MAPPED = (
    "any(each['address'] <= state.address < each['address'] + each['total_size'] "
    "for each in torch.cuda.memory_snapshot())"
)

FAULTS: dict[str, tuple[str, str, str]] = {
    "freed input": (_SCALE, "state.scale = None", "state.memory.expired()"),
    "replaced buffer": (
        _SCALE,
        "state.scale = torch.full((1, 1, 128), 2.0, device=device)",
        "state.memory.expired() and state.scale.data_ptr() != state.address",
    ),
    "stale pool read": (_STALE, "", "state.has_read"),
    "frozen temperature": (
        _TEMPERATURE, "state.temperature = 0.5", "state.temperature != 1.0"
    ),
    "dropped pool": (
        _POOL, "state.scale = None\ndel pool\ntorch.cuda.empty_cache()", f"not {_MAPPED}"
    ),
    "weight zeroed in sleep": ("", _SLEEP, "not model.lm_head.weight.any().item()"),
    "index out of range": (
        _INDEX, "state.rows.fill_(1_000_000_000)", "state.rows.item() >= len(state.table)"
    ),
}  # fmt: skip
"""By fault: code before the captures of ``batching``, code after its first requests, and an
expression that is true if the fault is there then."""


def batching(fault: str = "") -> str:
    """Return continuous batching of transformers, with a planted fault or without one."""
    if not fault:
        return MODEL + _BATCHING.format(before="", after="", end="pass", requests=3)
    before, after, is_planted = FAULTS[fault]
    after += _PLANT.format(is_planted=is_planted)
    # One request at a time has the same replays in every run.
    return MODEL + _BATCHING.format(
        before=_COUNT + before, after=after, end="count_replays()", requests=1
    )


SOUND = {
    "continuous batching": batching(),
    "generate with a static cache": GENERATE,
    "three compiled models": COMPILED,
    "cudagraph trees": TREES,
}
