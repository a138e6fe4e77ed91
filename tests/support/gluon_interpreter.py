"""Runs kernels in Gluon on the CPU, one program after the other, since Triton does not.

Layouts of shared memory have effect, those of registers have none. Asynchronous operations take
effect as late as they may: a copy when its barrier is waited for, and a product of a warpgroup when
that product is waited for. Until then the destination of a copy holds noise, so that a stage that
is read or overwritten too early gives wrong results. Barriers between threads, which the compiler
adds, have no equivalent here. Specialised warps are threads that take turns at barriers. The source
is run as Python, with the names of Gluon bound to the functions of this module.
"""

from __future__ import annotations

import itertools
import math
import types
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import torch
import triton
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import tensor_cores
from graphkit.ops.kernels import streamed_tile

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

    def __getitem__(self, index):
        return Pointer(self.memory, self.places[index])

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


def places_of(shape, layout, itemsize):
    """Return where a layout of shared memory puts each element of a shape."""
    if isinstance(layout, language.SharedLinearLayout):
        rank = len(layout.offset_bases[0])
        places = _linear_places(shape[-rank:], layout.offset_bases)
    elif isinstance(layout, language.NVMMASharedLayout):
        rank, chunk, row = layout.rank, 16 // itemsize, layout.swizzle_byte_width
        *others, width = shape[-rank:]
        atoms = [width * itemsize // row, *others, row // itemsize]  # one after the other
        places = _swizzled_places(atoms[1:], chunk, 128 // row, row // 16)
        places = torch.cat([places + atom * places.numel() for atom in range(atoms[0])], -1)
    else:
        rank = len(layout.order)
        assert list(layout.order) == list(range(rank))[::-1]
        places = _swizzled_places(shape[-rank:], layout.vec, layout.per_phase, layout.max_phase)
    stages = torch.arange(math.prod(shape[:-rank])) * places.numel()
    return (stages.view(-1, *[1] * rank) + places).view(shape)


def _swizzled_places(shape, chunk, rows, phases):
    """Return places in rows whose chunk c is at c XOR (row // ``rows`` modulo ``phases``)."""
    row, column = torch.arange(math.prod(shape[:-1]))[:, None], torch.arange(shape[-1])
    phase = row // rows % phases
    swizzled = (column // chunk ^ phase) * chunk + column % chunk
    return (row * shape[-1] + swizzled).view(shape)


def _linear_places(shape, bases):
    """Return the inverse of a linear layout, which maps each bit of a place to coordinates."""
    place = torch.arange(math.prod(shape))
    assert len(place) == 2 ** len(bases)
    coordinates = [torch.zeros_like(place) for _ in shape]
    for bit, basis in enumerate(bases):
        for axis, step in enumerate(basis):
            coordinates[axis] ^= (place >> bit & 1) * step
    places = torch.full(list(shape), -1)
    places[tuple(coordinates)] = place
    assert (places >= 0).all()
    return places


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, memory, places):
        self.memory, self.places, self.dtype = memory, places, LANGUAGE_DTYPES[memory.dtype]

    def index(self, place):
        return Shared(self.memory, self.places[int(place)])

    def permute(self, order):
        return Shared(self.memory, self.places.permute(order))

    def _reinterpret(self, dtype, shape, layout):
        assert self.memory.dtype == DTYPES.get(dtype, dtype)
        assert self.places.numel() == self.memory.numel() == math.prod(shape)
        return Shared(self.memory, places_of(list(shape), layout, self.memory.itemsize))

    def load(self, layout):
        return block(self.memory[self.places])

    def store(self, value):
        self.memory[self.places] = value

    def scramble(self):
        self.store(torch.randint(1, 100, self.places.shape).to(self.memory.dtype))


class Described:
    """A tensor whose blocks are copied by descriptor; a block behind its end has zeros there."""

    def __init__(self, descriptor):
        self.tensor = torch.as_strided(
            descriptor.base, descriptor.shape, descriptor.strides, descriptor.base.storage_offset()
        )
        self.block_shape, self.layout = descriptor.block_shape, descriptor.layout
        self.dtype = LANGUAGE_DTYPES[self.tensor.dtype]
        nbytes = math.prod(self.block_shape) * self.tensor.itemsize
        self.block_type = types.SimpleNamespace(nbytes=nbytes)

    def block_at(self, place):
        found = torch.zeros(self.block_shape, dtype=self.tensor.dtype)
        inner = self.tensor
        for axis, (begin, size) in enumerate(zip(place, self.block_shape, strict=True)):
            length = max(0, min(size, self.tensor.shape[axis] - int(begin)))
            inner = inner.narrow(axis, int(begin) if length else 0, length)
        found[tuple(slice(length) for length in inner.shape)] = inner
        return found


class Barrier:
    """Counts the bytes of copies. A phase ends when all that it expects have arrived."""

    def begin(self):
        self.expected, self.copies, self.phases = 0, [], 0

    def expect(self, nbytes):
        assert not self.copies, "the barrier expects bytes of one phase at a time"
        self.expected += nbytes

    def wait(self, phase):
        if self.copies:
            assert self.expected == sum(tensor.block_type.nbytes for tensor, *_ in self.copies)
            for tensor, place, shared in self.copies:
                shared.store(tensor.block_at(place))
            self.expected, self.copies = 0, []
            self.phases += 1
        assert self.phases > 0, "the phase never ends"
        assert (self.phases - 1) % 2 == int(phase), "the phase has not begun"


class ArrivalBarrier:
    """Counts arrivals of threads. Copies before an arrival take effect when it is waited for."""

    DEADLOCK_S = 20

    def begin(self, count):
        self.count = self.pending = count
        self.phases, self.copies = 0, []

    def arrive(self, turns, count, copies=()):
        self.copies += copies
        self.pending -= count
        assert self.pending >= 0, "more threads arrive than the barrier counts"
        if not self.pending:
            self.pending, self.phases = self.count, self.phases + 1
        turns.notify_all()

    def wait(self, turns, phase):
        # A barrier whose first phase has not ended counts as one whose phase 1 has.
        while self.phases % 2 == phase % 2:
            assert turns.wait(self.DEADLOCK_S), "the phase never ends"
        for shared, pointer, mask in self.copies:
            shared.store(pointer.load(mask, None))
        self.copies = []


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count, kind):
        self.barriers = [kind() for _ in range(count)]

    def index(self, place):
        return self.barriers[int(place)]


class Running:
    """A sum, and the operands of a product of a warpgroup that is added when it is waited for."""

    def __init__(self, total, *operands):
        self.total, self.operands = total, operands

    def finished(self):
        left, right = (
            each.load(None) if isinstance(each, Shared) else each for each in self.operands
        )
        return block(tensor_cores.multiply(left, right, self.total))


class Program:
    """The names of Gluon for the program at a place of the grid."""

    barrier = Barrier

    def __init__(self, place, programs):
        self.place, self.programs = place, programs

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

    def num_programs(self, axis):
        return self.programs[axis]

    def convert_layout(self, value, layout, assert_trivial=False):
        return value

    def allocate_shared_memory(self, dtype, shape, layout):
        if isinstance(layout, mbarrier.MBarrierLayout):
            return Barriers(shape[0], self.barrier)
        memory = torch.empty(math.prod(shape), dtype=DTYPES.get(dtype, dtype))
        shared = Shared(memory, places_of(list(shape), layout, memory.itemsize))
        shared.scramble()
        return shared

    def load(self, pointer, mask=None, other=None, eviction_policy=""):
        return pointer.load(mask, other)

    def store(self, pointer, value, mask=None, eviction_policy=""):
        pointer.store(value, mask)

    def reshape(self, value, shape):
        return value.reshape(list(shape))

    def permute(self, value, order):
        return value.permute(order)

    def split(self, value):
        return value.unbind(-1)

    def join(self, value, other):
        return torch.stack((value, other), -1)

    def broadcast(self, *values):
        return torch.broadcast_tensors(*values)

    def sum(self, value, axis):
        return value.sum(axis)

    def fma(self, value, other, summand):
        return block(tensor_cores.fma(value, other, summand))

    def exp(self, value):
        return value.exp()

    def rsqrt(self, value):
        return value.rsqrt()

    def mma_v2(self, left, right, total):
        return block(tensor_cores.multiply(left, right, total))

    def warpgroup_mma(self, left, right, total, use_acc=True, is_async=False):
        running = Running(total if use_acc else total * 0, left, right)
        return running if is_async else running.finished()

    def warpgroup_mma_wait(self, pending, deps):
        assert pending == 0, "products that still run have no results"
        results = tuple(running.finished() for running in deps)
        return results if len(results) > 1 else results[0]

    def fence_async_shared(self):
        pass


class SpecialisedProgram(Program):
    """A program whose partitions of warps run as threads, one of them at a time."""

    barrier = ArrivalBarrier

    def __init__(self, place, programs):
        super().__init__(place, programs)
        self.turns = Condition()

    def maximum(self, value, other):
        return block(torch.maximum(torch.as_tensor(value), torch.as_tensor(other)))

    def minimum(self, value, other):
        return block(torch.minimum(torch.as_tensor(value), torch.as_tensor(other)))

    def where(self, condition, value, other):
        return block(torch.where(torch.as_tensor(condition), value, other))

    def full(self, shape, value, dtype, layout):
        return block(torch.full(shape, value, dtype=DTYPES[dtype]))

    def max(self, value, axis):
        return value.amax(axis)

    def exp2(self, value):
        return value.exp2()

    def associative_scan(self, value, axis, combine):
        return value.cumsum(axis, dtype=value.dtype)

    def warp_specialize(self, partitions, warps, registers):
        def run(partition):
            function, arguments = partition
            with self.turns:
                function(*arguments)

        with ThreadPoolExecutor(len(partitions)) as pool:
            list(pool.map(run, partitions))


class Arrivals:
    """Copies by threads that arrive at barriers; the names of ``mbarrier`` and ``async_copy``."""

    MBarrierLayout = mbarrier.MBarrierLayout
    THREADS = 128

    def __init__(self, turns):
        self.turns, self.copies = turns, []

    def init(self, barrier, count):
        barrier.begin(count)

    def wait(self, barrier, phase):
        barrier.wait(self.turns, int(phase))

    def arrive(self, barrier):
        barrier.arrive(self.turns, 1)

    def async_copy_global_to_shared(self, shared, pointer, mask=None):
        shared.scramble()
        self.copies.append((shared, pointer, mask))

    def mbarrier_arrive(self, barrier, increment_count):
        assert not increment_count
        barrier.arrive(self.turns, self.THREADS, self.copies)
        self.copies = []


class ThreadCopies:
    """Copies by threads, in groups; the names of ``async_copy``."""

    def __init__(self):
        self.copies, self.groups = [], []

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


class BoxCopies:
    """Copies by descriptor, which a barrier counts; the names of ``mbarrier`` and ``tma``."""

    MBarrierLayout = mbarrier.MBarrierLayout

    def init(self, barrier, count):
        assert count == 1
        barrier.begin()

    def expect(self, barrier, nbytes, pred=True):
        if pred:
            barrier.expect(nbytes)

    def wait(self, barrier, phase):
        barrier.wait(phase)

    def async_copy_global_to_shared(self, tensor, place, barrier, shared, pred):
        if pred:
            shared.scramble()
            barrier.copies.append((tensor, place, shared))


def bound(kernel, program, replaced):
    """Return a kernel as a function of Python, as those that it calls."""
    names = dict(kernel.fn.__globals__)
    names |= {name: getattr(program, name) for name in names if name in vars(Program)}
    names |= {
        name: each.value for name, each in names.items() if isinstance(each, language.constexpr)
    }
    boxes = BoxCopies()
    names |= {"gl": program, "async_copy": ThreadCopies(), "mbarrier": boxes, "tma": boxes}
    if isinstance(program, SpecialisedProgram):
        names["mbarrier"] = names["async_copy"] = Arrivals(program.turns)
    for name, value in (vars(streamed_tile) | kernel.fn.__globals__).items():
        if isinstance(value, triton.JITFunction):
            names[name] = types.FunctionType(value.fn.__code__, names)
    names |= replaced
    return names[kernel.__name__]


def run_kernel(kernel, grid, arguments, replaced, program=Program):
    """Run a kernel.

    Args:
        kernel: The function of Gluon.
        grid: Programs along each axis.
        arguments: Arguments in the order of the parameters, tensors contiguous.
        replaced: Functions by the names of those that call PTX.
        program: Class of its programs.
    """
    memories = [
        Pointer(each.view(-1)) if isinstance(each, torch.Tensor)
        else Described(each) if isinstance(each, TensorDescriptor)
        else each
        for each in arguments
    ]  # fmt: skip
    for place in itertools.product(*map(range, grid)):
        bound(kernel, program(place, grid), replaced)(*memories)
