"""The whole stack: against its padded formulation, over steps of SGD, and what CompSkip runs."""

import copy
from collections import Counter
from dataclasses import replace

import kunlun_padded as padded
import pytest
import torch
from kunlun_checks import assert_same, jagged, pad, randomized
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_attn.modules.gdpa import PersonalizedFeedForward
from jagged_attn.modules.kunlun import Kunlun
from jagged_attn.modules.kunlun_blocks import RankingHead
from jagged_attn.modules.kunlun_config import EventTowerConfig, InteractionConfig, SubBlocks, tower_plan
from jagged_attn.modules.rotary import TemporalSelfAttention
from jagged_attn.modules.seed_pooling import HierarchicalSeedPooling

TOWERS = {
    "click": EventTowerConfig(12, 2, 3, num_layers=3, window=3, num_seeds=5, kron_rank=2, num_keys=7),
    "impression": EventTowerConfig(
        10, 1, 2, num_layers=2, window=1, num_seeds=7, kron_rank=3, num_keys=5, activation=("relu",), ffn_scale=0.5
    ),
    "like": EventTowerConfig(6, 3, 1, num_layers=1, window=2, num_seeds=3, num_keys=3, rotary=False),
}
SIZES = InteractionConfig(num_summary_tokens=3, num_experts=2, rank=2, hidden=9)
TOKENS, WIDTH = 5, 8
LENGTHS = {"click": [3, 0, 4, 2], "impression": [0, 0, 7, 1], "like": [1, 0, 2, 0]}
ALL_EMPTY = {name: [0, 0, 0] for name in LENGTHS}


def batch(lengths: dict[str, list[int]], seed: int = 0) -> tuple:
    """Tokens, values by event type, lengths, timestamps (for clicks alone), and labels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).double()

    num = len(lengths["click"])
    lengths_t = {name: torch.tensor(n) for name, n in lengths.items()}
    events = {name: normal(sum(n), TOWERS[name].embed_dim) for name, n in lengths.items()}
    gaps = torch.rand(sum(lengths["click"]), generator=generator).mul(14).exp().long()
    stamps = [1_760_000_000 + part.cumsum(0) for part in gaps.split(lengths["click"])]
    labels = torch.randint(0, 2, (num,), generator=generator).double()
    return normal(num, TOKENS, WIDTH), events, lengths_t, {"click": torch.cat(stamps)}, labels


def padded_stack(params, pattern, closing, tokens, events, lengths, stamps):
    dense = {name: pad(x, lengths[name]) for name, x in events.items()}
    dense_stamps = {name: pad(x, lengths[name]) for name, x in stamps.items()}
    return padded.kunlun(params, TOWERS, 2, pattern, closing, tokens, dense, lengths, dense_stamps)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, "glg"),
        ({"comp_skip": False, "closing_pool": False}, "fff"),
        ({"pattern": ("full", "local", "global")}, "flg"),
    ],
    ids=["CompSkip", "full, no closing pool", "own pattern"],
)
@pytest.mark.parametrize("lengths", [LENGTHS, ALL_EMPTY], ids=["mixed", "all-empty"])
def test_stack_equals_its_padded_formulation(options, pattern, lengths):
    model = randomized(Kunlun(TOKENS, WIDTH, TOWERS, SIZES, **options))
    tokens, events, lengths_t, stamps, _ = batch(lengths)
    inputs = {"tokens": tokens, **events}
    for x in inputs.values():
        x.requires_grad_()

    def actual(m, x):
        return m(x["tokens"], {name: jagged(x[name], lengths_t[name]) for name in events}, stamps)

    def formulation(p, x):
        parts = {name: x[name] for name in events}
        return padded_stack(p, pattern, options.get("closing_pool", True), x["tokens"], parts, lengths_t, stamps)

    assert_same(actual, formulation, model, inputs)


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Kunlun(TOKENS, WIDTH, TOWERS, SIZES)
        self.head = RankingHead(TOKENS, WIDTH)


def test_jagged_and_padded_model_have_one_loss_over_50_steps_of_sgd():
    torch.manual_seed(0)
    model = Ranker().double()
    params = {name: p.detach().clone().requires_grad_() for name, p in copy.deepcopy(model).named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    padded_optimizer = torch.optim.SGD(params.values(), lr=0.05)
    batches = [batch(LENGTHS, seed) for seed in range(4)] + [batch(ALL_EMPTY, 4)]
    losses = []
    for step in range(50):
        tokens, events, lengths, stamps, labels = batches[step % len(batches)]
        sequences = {name: jagged(x, lengths[name]) for name, x in events.items()}
        logits = model.head(model.stack(tokens, sequences, stamps)).squeeze(1)
        x = padded_stack(padded.sub(params, "stack"), "glg", True, tokens, events, lengths, stamps)
        padded_logits = padded.ranking_head(padded.sub(params, "head"), x).squeeze(1)
        pair = []
        for output, opt in ((logits, optimizer), (padded_logits, padded_optimizer)):
            loss = nn.functional.binary_cross_entropy_with_logits(output, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            pair.append(loss.item())
        losses.append(pair)
    jagged_losses, padded_losses = torch.tensor(losses, dtype=torch.float64).unbind(1)
    assert (jagged_losses - padded_losses).abs().max().item() < 1e-9
    # It did train: the loss of the last round over the batches is below that of the first.
    assert jagged_losses[-5:].mean() < 0.9 * jagged_losses[:5].mean()


KINDS = {HierarchicalSeedPooling: "pool", PersonalizedFeedForward: "feed forward", TemporalSelfAttention: "attend"}


def count_runs(model: Kunlun) -> dict[str, Counter]:
    """How often each kind of sub-block runs in each layer, seen by hooks during one forward."""
    counts: dict[str, Counter] = {}

    def hook(layer: str, kind: str):
        def count(module, args, output):
            counts.setdefault(layer, Counter())[kind] += 1

        return count

    for name, module in model.named_modules():
        if type(module) in KINDS:
            layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else "closing"
            module.register_forward_hook(hook(layer, KINDS[type(module)]))
    tokens, events, lengths, stamps, _ = batch(LENGTHS)
    model(tokens, {name: jagged(x, lengths[name]) for name, x in events.items()}, stamps)
    return counts


def test_comp_skip_runs_pooling_and_feed_forward_in_even_layers_and_attention_in_odd_ones():
    counts = count_runs(Kunlun(TOKENS, WIDTH, TOWERS, SIZES, dtype=torch.float64))
    assert counts == {
        "layers.0": {"pool": 3, "feed forward": 3},
        "layers.1": {"attend": 2},  # the tower with one layer is finished
        "layers.2": {"pool": 1, "feed forward": 1},  # and so is the one with two
        "closing": {"pool": 3},
    }


def test_without_comp_skip_every_layer_runs_everything():
    counts = count_runs(Kunlun(TOKENS, WIDTH, TOWERS, SIZES, comp_skip=False, dtype=torch.float64))
    every = {"pool", "feed forward", "attend"}
    assert counts == {
        "layers.0": dict.fromkeys(every, 3),
        "layers.1": dict.fromkeys(every, 2),
        "layers.2": dict.fromkeys(every, 1),
        "closing": {"pool": 3},
    }


@pytest.mark.parametrize("closing_pool", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, ALL_EMPTY], ids=["mixed", "all-empty"])
def test_every_parameter_gets_a_gradient(closing_pool, lengths):
    model = Kunlun(TOKENS, WIDTH, TOWERS, SIZES, closing_pool=closing_pool, dtype=torch.float64)
    tokens, events, lengths_t, stamps, _ = batch(lengths)
    model(tokens, {name: jagged(x, lengths_t[name]) for name, x in events.items()}, stamps).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


class _Operators(TorchDispatchMode):
    """Counts what runs: operators by name, and the elements of copies to other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.cloned = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket] += 1
        if func.overloadpacket is torch.ops.aten.clone:
            self.cloned = max(self.cloned, out.numel())
        return out


def test_no_gradient_is_put_into_a_whole_of_zeros_and_no_rows_are_copied_to_other_strides():
    model = Kunlun(TOKENS, WIDTH, TOWERS, replace(SIZES, num_summary_tokens=4), dtype=torch.float64)
    tokens, events, lengths, stamps, _ = batch({name: [40, 1, 9, 30] for name in LENGTHS})
    inputs = {name: jagged(x.requires_grad_(), lengths[name]) for name, x in events.items()}
    with _Operators() as seen:
        model(tokens.requires_grad_(), inputs, stamps).square().sum().backward()
    aten = torch.ops.aten
    assert not {aten.select_backward, aten.slice_backward, aten.index_put, aten.repeat} & seen.counts.keys()
    assert seen.cloned <= max(p.numel() for p in model.parameters())


def test_without_a_closing_pool_nothing_is_built_that_nobody_reads():
    model = Kunlun(TOKENS, WIDTH, TOWERS, SIZES, closing_pool=False)
    pool_only, local = SubBlocks(True, False, False), SubBlocks(False, False, True)
    assert model.plans["click"] == (SubBlocks(True, True, False), local, pool_only)
    assert model.plans["like"] == (pool_only,)
    assert "like" not in model.layers[0].transformers
    assert "impression" not in model.layers[1].transformers


def test_finished_towers_keep_their_last_summary():
    model = Kunlun(TOKENS, WIDTH, TOWERS, SIZES, closing_pool=False, dtype=torch.float64)
    seen = {}
    model.layers[2].register_forward_hook(lambda module, args, output: seen.update(after=output[2], before=args[2]))
    tokens, events, lengths, stamps, _ = batch(LENGTHS)
    model(tokens, {name: jagged(x, lengths[name]) for name, x in events.items()}, stamps)
    for name in ("impression", "like"):
        assert seen["after"][name] is seen["before"][name]
    assert seen["after"]["click"] is not seen["before"]["click"]


@pytest.mark.parametrize("pattern", [("local", "global"), ()])
def test_a_first_layer_that_does_not_pool_is_refused(pattern):
    with pytest.raises(ValueError, match="pattern must begin with a layer that pools"):
        tower_plan(pattern, reads_last=True)
