"""The formulas for parameters in docs/kunlun.md are those of the modules."""

import pytest

from jagged_attn.modules.gdpa import PersonalizedFeedForward
from jagged_attn.modules.kunlun_blocks import RankingHead, WeightGeneration
from jagged_attn.modules.rotary import RotaryTemporalEmbedding, TemporalSelfAttention
from jagged_attn.modules.seed_pooling import HierarchicalSeedPooling, SeedPooling
from jagged_attn.modules.wukong import WukongLayer

E, H, N, EX, KV, S, T, K, F, FMB, LCB = 12, 3, 5, 7, 11, 13, 4, 2, 17, 3, 6
M = FMB + LCB
COUNTS = [
    (PersonalizedFeedForward(E, H, N, EX, num_keys=KV), 2 * E * EX + 2 * E + 2 * KV * N),
    (
        PersonalizedFeedForward(E, H, N, EX, num_keys=KV, norm_weights=True),
        2 * E * EX + 2 * E + 2 * KV * N + 3 * E,
    ),
    (
        HierarchicalSeedPooling(E, H, S, T, rank=K),
        S * E + 2 * E + 4 * E**2 + 4 * E + K * (S * T + E**2),
    ),
    (SeedPooling(E, H, S, hidden=F), S * E + 4 * E**2 + 4 * E + 2 * (2 * E * F + F + E) + 4 * E),
    (RotaryTemporalEmbedding(4), 0),
    (TemporalSelfAttention(E, H), 4 * E**2 + 4 * E),
    (WeightGeneration(N, T, E, F), N * T + 2 * (2 * E * F + F + E)),
    (
        WukongLayer(N, E, num_fmb=FMB, num_lcb=LCB, rank=K, hidden=F),
        3 * N * K + (N * K * F + F + F * FMB * E + FMB * E) + LCB * N + M * N + 2 * E,
    ),
    (RankingHead(N, E, F, num_tasks=K), N * E * F + F + F * K + K),
]


@pytest.mark.parametrize(("module", "expected"), COUNTS, ids=[type(module).__name__ for module, _ in COUNTS])
def test_parameters(module, expected):
    assert sum(p.numel() for p in module.parameters()) == expected
