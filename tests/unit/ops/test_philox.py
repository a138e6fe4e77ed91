"""philox_uniform on every device: published answers, key and counter, and the statistics."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import InputError
from graphkit.graphs import RecorderBackend
from graphkit.ops.sampling import philox4x32, philox_uniform
from op_devices import CUDA, INTERPRETER, by, by_each

KNOWN_ANSWERS = {  # of the Random123 library, philox4x32 with 10 rounds
    "zeros": ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": (
        [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    "pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
}  # fmt: skip
SEEDS = [0, 1, -1, 2**32, -(2**32), 2**63 - 1, -(2**63), 0x299F31D0_A4093822]
POSITIONS = [0, 1, 7, 2**31 - 1, -1, -(2**31)]


def random_requests(requests, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
    positions = torch.randint(-(2**31), 2**31, (requests,), generator=generator)
    return seeds, positions.int()


def sample(seed, position, draw):
    """Return one draw, from the generator itself and in Python's integers."""
    counter = position % 2**32, draw // 4, 0, 0
    key = seed % 2**32, seed // 2**32 % 2**32
    words = philox4x32(list(map(torch.tensor, counter)), list(map(torch.tensor, key)))
    return words[draw % 4].item() // 256 / 2**24


@pytest.mark.parametrize("case", KNOWN_ANSWERS)
def test_known_answers(case):
    counter, key, expected = KNOWN_ANSWERS[case]
    words = philox4x32(list(map(torch.tensor, counter)), list(map(torch.tensor, key)))
    assert words.tolist() == expected


def test_known_answers_of_several_counters_at_once():
    counters, keys, expected = map(torch.tensor, zip(*KNOWN_ANSWERS.values(), strict=True))
    assert torch.equal(philox4x32(counters.unbind(1), keys.unbind(1)), expected)


def test_a_sample_is_the_high_bits_of_a_word():
    samples = philox_uniform(torch.tensor([0]), torch.tensor([0], dtype=torch.int32), 4)
    assert samples.dtype == torch.float32
    high_bits = [0x6627E8, 0xE169C5, 0xBC57AC, 0x9B00DB]
    assert samples.tolist() == [[bits / 2**24 for bits in high_bits]]


@by_each("requests", interpreter=[0, 1, 150], cuda=[0, 1, 31, 1025])
@pytest.mark.parametrize("draws", [1, 4, 5, 33])
def test_kernels_draw_the_same_samples(run, requests, draws):
    args = random_requests(requests, seed=draws)
    samples = run(philox_uniform, *args, draws)
    assert samples.dtype == torch.float32
    assert torch.equal(samples, philox_uniform(*args, draws))


@by(CUDA)
def test_many_draws(run):
    for requests in (0, 1, 31, 1025):
        args = random_requests(requests)
        assert torch.equal(run(philox_uniform, *args, 4096), philox_uniform(*args, 4096))


@by(INTERPRETER, CUDA)
def test_limits_of_seeds_and_positions(run):
    seeds = torch.tensor([0, -1, 2**32, 2**63 - 1, -(2**63)]).repeat_interleave(4)
    positions = torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32).repeat(5)
    samples = run(philox_uniform, seeds, positions, 33)
    assert torch.equal(samples, philox_uniform(seeds, positions, 33))


@pytest.mark.gpu
def test_strided_and_unaligned_rows():
    args = random_requests(65)
    for rows in (slice(1, None), slice(1, None, 2)):
        samples = philox_uniform(*(each.cuda()[rows] for each in args), 5)
        assert torch.equal(samples.cpu(), philox_uniform(*(each[rows] for each in args), 5))


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_is_the_key_and_position_and_draw_are_the_counter(seed):
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    samples = philox_uniform(torch.full((len(POSITIONS),), seed), positions, 9)
    assert samples.tolist() == [[sample(seed, each, i) for i in range(9)] for each in POSITIONS]


class TestIndependence:
    """A row is a function of its seed and position; n decides only where it ends."""

    def test_of_the_batch(self):
        seeds, positions = random_requests(9)
        batch = philox_uniform(seeds, positions, 5)
        for b in range(9):
            alone = philox_uniform(seeds[b : b + 1], positions[b : b + 1], 5)
            assert torch.equal(alone[0], batch[b])
        order = torch.randperm(9)
        assert torch.equal(philox_uniform(seeds[order], positions[order], 5), batch[order])

    @pytest.mark.parametrize("pad", [0, -1, 2**31 - 1])
    def test_of_pad_rows(self, pad):
        seeds, positions = random_requests(3)
        padded = [torch.cat([each, each.new_full((5,), pad)]) for each in (seeds, positions)]
        assert torch.equal(philox_uniform(*padded, 6)[:3], philox_uniform(seeds, positions, 6))

    def test_of_the_number_of_draws(self):
        requests = random_requests(4)
        most = philox_uniform(*requests, 33)
        for draws in range(1, 33):
            assert torch.equal(philox_uniform(*requests, draws), most[:, :draws])

    def test_of_earlier_calls_and_of_the_generator_of_torch(self):
        requests = random_requests(4)
        state = torch.get_rng_state()
        first = philox_uniform(*requests, 5)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        assert torch.equal(philox_uniform(*requests, 5), first)

    def test_of_the_layout(self):
        seeds, positions = random_requests(8)
        strided = philox_uniform(seeds[::2], positions[::2], 5)
        assert torch.equal(strided, philox_uniform(seeds, positions, 5)[::2])
        assert strided.is_contiguous()


COUNT = 2**16
STREAMS = {
    "draws": (torch.tensor([7]), torch.tensor([3]), COUNT),
    "positions": (torch.full((COUNT,), 7), torch.arange(COUNT), 1),
    "seeds": (torch.arange(COUNT), torch.full((COUNT,), 3), 1),
    "high halves of seeds": (torch.arange(COUNT) << 32, torch.full((COUNT,), 3), 1),
    "requests of five draws": (torch.arange(COUNT // 5), torch.arange(COUNT // 5), 5),
}


class TestStatistics:
    """Streams along each argument; bounds are 5 standard deviations of the statistic."""

    @pytest.fixture(params=STREAMS)
    def samples(self, request):
        seeds, positions, draws = STREAMS[request.param]
        return philox_uniform(seeds, positions.int(), draws).flatten().double()

    def test_range(self, samples):
        assert samples.min() >= 0
        assert samples.max() < 1
        assert torch.equal(samples * 2**24, (samples * 2**24).floor())

    def test_moments(self, samples):
        error = len(samples) ** -0.5
        assert abs(samples.mean() - 1 / 2) < 5 * error * (1 / 12) ** 0.5
        assert abs(samples.var() - 1 / 12) < 5 * error * (1 / 180) ** 0.5

    @pytest.mark.parametrize("bits", ["high", "low"])
    def test_chi_square(self, samples, bits):
        cell = samples * 256 if bits == "high" else samples * 2**24 % 256
        observed = torch.bincount(cell.long(), minlength=256)
        expected = len(samples) / 256
        chi_square = ((observed - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5

    def test_correlation(self, samples):
        for lag in (1, 2, 3, 4, 5):
            pairs = torch.stack([samples[:-lag], samples[lag:]])
            assert abs(torch.corrcoef(pairs)[0, 1]) < 5 * len(samples) ** -0.5


@pytest.mark.parametrize("draws", [1, 4, 5])
def test_an_empty_batch(draws):
    samples = philox_uniform(*random_requests(0), draws)
    assert samples.shape == (0, draws)
    assert samples.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": torch.zeros(3).int()}, r"seeds is \[3\] int32 on cpu, expected \[B\]"),
        ({"positions": torch.zeros(3).long()}, r"positions is \[3\] int64 .*= \[3\] int32 on cpu"),
        ({"positions": torch.zeros(2).int()}, r"positions is \[2\] int32 .*= \[3\] int32 on cpu"),
        ({"draws": 0}, "draws is 0, expected at least 1"),
    ],
)
def test_refusals(change, message):
    arguments = {"seeds": torch.zeros(3).long(), "positions": torch.zeros(3).int(), "draws": 1}
    with pytest.raises(InputError, match=message) as caught:
        philox_uniform(**arguments | change)
    assert caught.value.field == next(iter(change))


@pytest.mark.parametrize("requests", [0, 3])
def test_tracers_see_the_result(requests):
    args = *random_requests(requests), 5
    overload = torch.ops.graphkit.philox_uniform.default
    torch.library.opcheck(overload, args, test_utils=("test_schema", "test_faketensor"))


def test_a_replay_draws_at_the_current_positions():
    seeds, positions = random_requests(5)
    backend = RecorderBackend()
    with backend.session():
        graph = backend.capture(lambda: philox_uniform(seeds, positions, 5))
    positions += 1
    graph.replay()
    assert torch.equal(graph.output, philox_uniform(seeds, positions, 5))
