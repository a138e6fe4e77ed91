"""Runs kernels in Gluon on the CPU, one program after the other, since Triton does not.

Layouts have no effect. Asynchronous operations take effect as late as they may: a copy when its
group is waited for, and a product of a warpgroup when that product is waited for. Until then the
destination of a copy holds noise, so that a stage that is read or overwritten too early gives wrong
results. Barriers between threads, which the compiler adds, have no equivalent here. The source is
run as Python, with the names of Gluon bound to the functions of this module.
"""

from __future__ import annotations

import itertools
import types

import torch
import triton
from triton.experimental.gluon import language

DTYPES = {
    language.bfloat16: torch.bfloat16, language.float16: torch.float16,
    language.float32: torch.float32, language.float8e4nv: torch.float8_e4m3fn,
    language.int16: torch.int16, language.int32: torch.int32, language.int64: torch.int64,
    language.uint8: torch.uint8,
}  # fmt: skip
LANGUAGE_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class Block(torch.Tensor):
    """A tensor of a program, which is a value: operations leave their operands as they are."""

    __iadd__, __isub__, __imul__ = torch.Tensor.__add__, torch.Tensor.__sub__, torch.Tensor.__mul__

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        dtype = DTYPES.get(dtype, dtype)
        return self.view(dtype) if bitcast else super().to(dtype)


def block(tensor):
    return tensor.as_subclass(Block)


class Pointer:
    """Places in the memory of a tensor, which accesses may not leave."""

    def __init__(self, memory, places=0):
        self.memory, self.places = memory, places
        self.dtype = types.SimpleNamespace(element_ty=LANGUAGE_DTYPES[memory.dtype])

    def __add__(self, places):
        return Pointer(self.memory, self.places + places)

    def _selected(self, mask):
        places = torch.as_tensor(self.places).long()
        mask = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand_as(places)
        chosen = places[mask]
        assert ((chosen >= 0) & (chosen < self.memory.numel())).all(), "access out of bounds"
        return places, mask, chosen

    def load(self, mask, other):
        places, mask, chosen = self._selected(mask)
        found = torch.full(places.shape, other or 0).to(self.memory.dtype)
        found[mask] = self.memory[chosen]
        return block(found)

    def store(self, value, mask):
        places, mask, chosen = self._selected(mask)
        self.memory[chosen] = value.expand(places.shape)[mask].to(self.memory.dtype)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, memory):
        self.memory = memory

    def index(self, place):
        return Shared(self.memory[int(place)])

    def slice(self, start, length, dim):
        return Shared(self.memory.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.memory.permute(order))

    def _reinterpret(self, dtype, shape, layout):
        assert self.memory.dtype == DTYPES.get(dtype, dtype)
        return Shared(self.memory.view(list(shape)))

    def load(self, layout):
        return block(self.memory.clone())

    def store(self, value):
        self.memory.copy_(value)

    def scramble(self):
        self.memory.copy_(torch.randint(1, 100, self.memory.shape).to(self.memory.dtype))


class Running:
    """A sum, and the operands of a product of a warpgroup that is added when it is waited for."""

    def __init__(self, total, *operands):
        self.total, self.operands = total, operands

    def finished(self):
        if not self.operands:
            return self.total
        left, right = self.operands
        return self.total + left.memory.float() @ right.memory.float()


class Program:
    """The names of Gluon for the program at a place of the grid."""

    def __init__(self, place):
        self.place, self.copies, self.groups = place, [], []

    def __getattr__(self, name):
        return getattr(language, name)  # layouts, dtypes and ``static_range``

    def program_id(self, axis):
        return block(torch.tensor(self.place[axis]))

    def static_range(self, *limits):
        return range(*limits)

    def arange(self, start, end, layout):
        return block(torch.arange(start, end, dtype=torch.int32))

    def zeros(self, shape, dtype, layout):
        return block(torch.zeros(shape, dtype=DTYPES[dtype]))

    def minimum(self, value, other):
        return value.clamp(max=other)

    def where(self, condition, value, other):
        return value if condition else other

    def convert_layout(self, value, layout, assert_trivial):
        assert assert_trivial
        return value

    def allocate_shared_memory(self, dtype, shape, layout):
        shared = Shared(torch.empty(list(shape), dtype=DTYPES.get(dtype, dtype)))
        shared.scramble()
        return shared

    def load(self, pointer, mask=None, other=None):
        return pointer.load(mask, other)

    def store(self, pointer, value, mask=None):
        pointer.store(value, mask)

    def reshape(self, value, shape):
        return value.reshape(list(shape))

    def permute(self, value, order):
        return value.permute(order)

    def split(self, value):
        return value.unbind(-1)

    def broadcast(self, *values):
        return torch.broadcast_tensors(*values)

    def sum(self, value, axis):
        return value.sum(axis)

    def exp(self, value):
        return value.exp()

    def async_copy_global_to_shared(self, shared, pointer, mask=None):
        shared.scramble()
        self.copies.append((shared, pointer, mask))

    def commit_group(self):
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, pending):
        for _ in range(len(self.groups) - pending):
            for shared, pointer, mask in self.groups.pop(0):
                shared.store(pointer.load(mask, None))

    def mma_v2(self, left, right, total):
        return total + left.float() @ right.float()

    def warpgroup_mma_init(self, total):
        return Running(total)

    def warpgroup_mma(self, left, right, total, is_async):
        return Running(total, left, right)

    def warpgroup_mma_wait(self, pending, deps):
        assert pending == 0, "products that still run have no results"
        (running,) = deps
        return running.finished()

    def fence_async_shared(self):
        pass


def bound(kernel, program, replaced):
    """Return a kernel as a function of Python, as those that it calls."""
    names = dict(kernel.fn.__globals__)
    names |= {name: getattr(program, name) for name in names if name in vars(Program)}
    names |= {"gl": program, "async_copy": program}
    for name, value in kernel.fn.__globals__.items():
        if isinstance(value, triton.JITFunction):
            names[name] = types.FunctionType(value.fn.__code__, names)
    names |= replaced
    return names[kernel.__name__]


def run_kernel(kernel, grid, arguments, replaced):
    """Run a kernel.

    Args:
        kernel: The function of Gluon.
        grid: Programs along each axis.
        arguments: Arguments in the order of the parameters, tensors contiguous.
        replaced: Functions by the names of those that call PTX.
    """
    memories = [
        Pointer(each.view(-1)) if isinstance(each, torch.Tensor) else each for each in arguments
    ]
    for place in itertools.product(*map(range, grid)):
        bound(kernel, Program(place), replaced)(*memories)
