"""Each block equals its padded float64 formulation: output and every gradient."""

import kunlun_padded as padded
import pytest
import torch
from kunlun_checks import assert_same, jagged, pad, randomized, unpad
from torch import nn

from jagged_attn.masks import BlockDiagonal, SlidingWindow
from jagged_attn.modules.gdpa import PersonalizedFeedForward
from jagged_attn.modules.kunlun_blocks import RankingHead, WeightGeneration
from jagged_attn.modules.rotary import RotaryTemporalEmbedding, TemporalSelfAttention
from jagged_attn.modules.seed_pooling import HierarchicalSeedPooling, SeedPooling, SumKronLinear
from jagged_attn.modules.wukong import WukongExperts, WukongLayer

WINDOW = 3
# 0, 1, the window and one less and more, several windows; nothing but empty sequences.
LENGTHS = [[WINDOW, 0, 1, WINDOW + 1, 11, WINDOW - 1, 0], [0, 0, 0]]
lengths_cases = pytest.mark.parametrize("lengths", LENGTHS, ids=["mixed", "all-empty"])


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).double().requires_grad_()


def stamps(lengths: torch.Tensor) -> torch.Tensor:
    """Ascending Unix seconds in each sequence, gaps from seconds to weeks, some of them 0."""
    generator = torch.Generator().manual_seed(3)
    gaps = torch.rand(int(lengths.sum()), generator=generator).mul(14).exp().long() - 1
    return torch.cat([1_760_000_000 + part.cumsum(0) for part in gaps.split(lengths.tolist())])


@lengths_cases
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("activation", "scale", "norm_weights"), [("gelu", 1.0, False), (("relu", "gelu", "silu"), 0.4, True)]
)
def test_personalized_feed_forward(lengths, backend, activation, scale, norm_weights):
    lengths = torch.tensor(lengths)
    layer = PersonalizedFeedForward(
        15, 3, 4, 7, num_keys=11, activation=activation, scale=scale, norm_weights=norm_weights, backend=backend
    )
    layer = randomized(layer)
    inputs = {"s": normal(int(lengths.sum()), 15), "context": normal(len(lengths), 4, 7, seed=2)}
    names = [activation] * 3 if isinstance(activation, str) else list(activation)

    def formulation(p, x):
        return unpad(padded.feed_forward(p, pad(x["s"], lengths), x["context"], 3, names, scale), lengths)

    assert_same(lambda m, x: m(jagged(x["s"], lengths), x["context"]).values(), formulation, layer, inputs)


@lengths_cases
@pytest.mark.parametrize(
    ("norm", "out_proj", "residual"),
    [("layer_norm", True, False), ("rms_norm", False, True), ("none", True, True)],
)
def test_hierarchical_seed_pooling(lengths, norm, out_proj, residual):
    lengths = torch.tensor(lengths)
    pool = randomized(HierarchicalSeedPooling(15, 3, 13, 5, rank=2, norm=norm, out_proj=out_proj, residual=residual))
    inputs = {"s": normal(int(lengths.sum()), 15)}
    norms = {"layer_norm": padded.layer_norm, "rms_norm": padded.rms_norm, "none": lambda p, x: x}

    def formulation(p, x):
        return padded.hierarchical_seed_pooling(p, pad(x["s"], lengths), lengths, 3, norms[norm], residual)

    assert_same(lambda m, x: m(jagged(x["s"], lengths)), formulation, pool, inputs)


@lengths_cases
def test_seed_pooling(lengths):
    lengths = torch.tensor(lengths)
    pool = randomized(SeedPooling(15, 3, 7, hidden=11))
    inputs = {"s": normal(int(lengths.sum()), 15)}
    assert_same(
        lambda m, x: m(jagged(x["s"], lengths)),
        lambda p, x: padded.seed_pooling(p, pad(x["s"], lengths), lengths, 3),
        pool,
        inputs,
    )


@lengths_cases
@pytest.mark.parametrize(
    ("gap", "combine", "timed", "rotate_values"),
    [
        ("previous", "sum", True, False),
        ("to_last", "split", True, False),
        ("previous", "split", False, True),
        ("to_last", "sum", True, True),
    ],
)
@pytest.mark.parametrize("mask", [SlidingWindow(WINDOW, WINDOW), BlockDiagonal(WINDOW + 1)], ids=["window", "block"])
def test_temporal_self_attention(lengths, gap, combine, timed, rotate_values, mask):
    lengths = torch.tensor(lengths)
    attention = randomized(TemporalSelfAttention(24, 3, mask=mask, rotate_values=rotate_values))
    rotary = RotaryTemporalEmbedding(8, gap=gap, combine=combine)
    inputs = {"s": normal(int(lengths.sum()), 24)}
    timestamps = stamps(lengths) if timed else None

    def actual(m, inputs):
        x = jagged(inputs["s"], lengths)
        return m(x, rotary(x, timestamps)).values()

    def formulation(p, x):
        s = pad(x["s"], lengths)
        padded_stamps = None if timestamps is None else pad(timestamps, lengths)
        angle = padded.angles(lengths, s.shape[1], padded_stamps, 8, gap, combine)
        allowed = padded.window(lengths, s.shape[1], WINDOW)
        if isinstance(mask, BlockDiagonal):
            allowed = padded.block(lengths, s.shape[1], WINDOW + 1)
        return unpad(padded.self_attention(p, s, allowed, 3, angle, rotate_values), lengths)

    assert_same(actual, formulation, attention, inputs)


@pytest.mark.parametrize("length", [63, 64, 65, 129])
def test_block_attention_of_64_rows(length):
    lengths = torch.tensor([length, 0, 1])
    attention = randomized(TemporalSelfAttention(6, 1, mask=BlockDiagonal(64), rotate_values=True))
    inputs = {"s": normal(int(lengths.sum()), 6)}
    rotary = RotaryTemporalEmbedding(6)

    def actual(m, inputs):
        x = jagged(inputs["s"], lengths)
        return m(x, rotary(x)).values()

    def formulation(p, x):
        s = pad(x["s"], lengths)
        angle = padded.angles(lengths, s.shape[1], None, 6, "previous", "sum")
        return unpad(padded.self_attention(p, s, padded.block(lengths, s.shape[1], 64), 1, angle, True), lengths)

    assert_same(actual, formulation, attention, inputs)


DENSE = {
    "weight generation": (WeightGeneration(7, 3, 5, hidden=11), (7, 5), padded.weight_generation),
    "wukong": (WukongLayer(7, 5, num_fmb=3, num_lcb=2, rank=4, hidden=11), (7, 5), padded.wukong_layer),
    "wukong, as many tokens out as in": (WukongLayer(5, 7, num_fmb=3, num_lcb=2), (5, 7), padded.wukong_layer),
    "experts, strided": (
        WukongExperts(11, 7, 5, 3, rank=2),
        (11, 5),
        lambda p, x: padded.wukong_experts(p, x, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]),
    ),
    "experts, strided evenly": (
        WukongExperts(12, 7, 5, 3, rank=2),
        (12, 5),
        lambda p, x: padded.wukong_experts(p, x, padded.strided(12, 3)),
    ),
    "one expert": (
        WukongExperts(11, 7, 5, 1, rank=2),
        (11, 5),
        lambda p, x: padded.wukong_experts(p, x, [[*range(11)]]),
    ),
    "experts, contiguous": (
        WukongExperts(11, 7, 5, 3, rank=2, partition="contiguous"),
        (11, 5),
        lambda p, x: padded.wukong_experts(p, x, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    ),
    "sum of kronecker products": (SumKronLinear(11, 3, 5, rank=2, embed_dim_out=7), (11, 5), padded.sum_kron),
    "head": (RankingHead(7, 5, hidden=11, num_tasks=2), (7, 5), padded.ranking_head),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("batch", [3, 0])
def test_dense_block(name, batch):
    module, shape, formulation = DENSE[name]
    module = randomized(module)
    x = normal(batch, *shape)
    assert_same(lambda m, inputs: m(inputs["x"]), lambda p, inputs: formulation(p, inputs["x"]), module, {"x": x})


def test_sum_kron_linear_is_the_dense_map_built_from_its_factors():
    layer = randomized(SumKronLinear(11, 3, 5, rank=2))
    x = torch.randn(4, 11, 5, dtype=torch.float64)
    dense = sum(torch.kron(z.T.contiguous(), w.T.contiguous()) for z, w in zip(layer.z, layer.w, strict=True))
    assert dense.shape == (3 * 5, 11 * 5)
    torch.testing.assert_close(layer(x).flatten(1), x.flatten(1) @ dense.T, rtol=0, atol=1e-13)
    assert sum(p.numel() for p in layer.parameters()) == 2 * (11 * 3 + 5**2)


def test_sum_kron_linear_keeps_the_variance_of_its_input():
    torch.manual_seed(0)
    out = SumKronLinear(256, 32, 96, rank=8)(torch.randn(64, 256, 96))
    # A variance of n normal numbers has a standard deviation of sqrt(2 / n); the k (S T + E^2) factors are fewer.
    assert abs(out.var().item() - 1) < 6 * (2 / (256 * 32)) ** 0.5


def test_a_sequence_without_events_does_not_disturb_the_others():
    pool = randomized(HierarchicalSeedPooling(15, 3, 13, 5, rank=2))
    s = normal(9, 15)
    with_empty = pool(jagged(s, torch.tensor([0, 4, 0, 5])))
    without = pool(jagged(s, torch.tensor([4, 5])))
    torch.testing.assert_close(with_empty[[1, 3]], without, rtol=0, atol=1e-14)
    assert not isinstance(pool.norm, nn.Identity)


def test_another_module_or_a_hook_in_the_place_of_a_projection_gets_q_k_and_v():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, query, key=None, value=None):
            return self.inner(query, key, value)

    for rotate_values in (False, True):
        layer, x = (
            TemporalSelfAttention(16, 2, rotate_values=rotate_values),
            jagged(torch.randn(5, 16), torch.tensor([2, 3])),
        )
        rotation = RotaryTemporalEmbedding(8)(x)
        expected = [layer(x, r).values() for r in (None, rotation)]
        seen = []
        layer.in_proj.register_forward_hook(lambda module, args, out, seen=seen: seen.append(len(out)))
        layer.in_proj = Wrapped(layer.in_proj)
        for r, right in zip((None, rotation), expected, strict=True):
            torch.testing.assert_close(layer(x, r).values(), right)
        assert seen == [3, 3]
