"""What every module owes its user: meta construction, state dicts, tracing, compilation, errors with names."""

import re

import pytest
import torch
from kunlun_checks import jagged
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.train_pipeline.tracing import Tracer

from jagged_attn.masks import BlockDiagonal, Mask, SlidingWindow
from jagged_attn.modules.gdpa import KeyValueGeneration, PersonalizedFeedForward
from jagged_attn.modules.kunlun import Kunlun, KunlunLayer
from jagged_attn.modules.kunlun_blocks import (
    KunlunInteractionBlock,
    KunlunTransformerBlock,
    RankingHead,
    WeightGeneration,
)
from jagged_attn.modules.kunlun_config import EventTowerConfig, InteractionConfig, SubBlocks
from jagged_attn.modules.rotary import RotaryTemporalEmbedding, TemporalSelfAttention, rotate, validate_timestamps_sync
from jagged_attn.modules.seed_pooling import HierarchicalSeedPooling, SeedPooling, SumKronLinear
from jagged_attn.modules.wukong import TokenLinear, WukongExperts, WukongLayer

LENGTHS = torch.tensor([3, 0, 4])
TOWERS = {
    "click": EventTowerConfig(12, 3, 2, num_layers=3, window=3, num_seeds=5, num_keys=7),
    "impression": EventTowerConfig(10, 5, 1, num_layers=2, window=BlockDiagonal(64), num_seeds=3, num_keys=5),
}
SIZES = InteractionConfig(num_summary_tokens=3, rank=2)


def history(width: int = 12, seed: int = 1) -> JaggedTensor:
    return jagged(torch.randn(7, width, generator=torch.Generator().manual_seed(seed)), LENGTHS)


def dense(*shape: int) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))


def events() -> dict[str, JaggedTensor]:
    return {"click": history(12), "impression": history(10, seed=3)}


ROTATION = torch.stack([torch.linspace(-1, 1, 14).reshape(7, 2).cos(), torch.linspace(-1, 1, 14).reshape(7, 2).sin()])
SUMMARIES = {"click": dense(2, 12), "impression": dense(1, 10)}
FULL = SubBlocks(True, True, True)
MODULES = {
    "KeyValueGeneration": (lambda **k: KeyValueGeneration(4, 7, 5, 12, 3, **k), lambda: (dense(4, 7),)),
    "PersonalizedFeedForward": (
        lambda **k: PersonalizedFeedForward(12, 3, 4, 7, num_keys=5, norm_weights=True, **k),
        lambda: (history(), dense(4, 7)),
    ),
    "SumKronLinear": (lambda **k: SumKronLinear(5, 3, 7, 2, **k), lambda: (dense(5, 7),)),
    "SeedPooling": (lambda **k: SeedPooling(12, 3, 5, **k), lambda: (history(),)),
    "HierarchicalSeedPooling": (lambda **k: HierarchicalSeedPooling(12, 3, 5, 2, **k), lambda: (history(),)),
    "TemporalSelfAttention": (
        lambda **k: TemporalSelfAttention(12, 3, mask=SlidingWindow(2, 2), **k),
        lambda: (history(), ROTATION),
    ),
    "TokenLinear": (lambda **k: TokenLinear(5, 3, **k), lambda: (dense(5, 7),)),
    "WeightGeneration": (lambda **k: WeightGeneration(5, 3, 7, 11, **k), lambda: (dense(5, 7),)),
    "WukongLayer": (lambda **k: WukongLayer(5, 7, num_fmb=2, num_lcb=1, rank=2, **k), lambda: (dense(5, 7),)),
    "WukongExperts": (lambda **k: WukongExperts(11, 5, 7, 2, rank=2, **k), lambda: (dense(11, 7),)),
    "KunlunInteractionBlock": (
        lambda **k: KunlunInteractionBlock(5, 7, TOWERS, {"click": True, "impression": False}, SIZES, **k),
        lambda: (dense(5, 7), events(), SUMMARIES),
    ),
    "KunlunTransformerBlock": (
        lambda **k: KunlunTransformerBlock(TOWERS["click"], FULL, 3, 7, **k),
        lambda: (history(), dense(3, 7), ROTATION),
    ),
    "KunlunLayer": (
        lambda **k: KunlunLayer(5, 7, TOWERS, {"click": FULL, "impression": SubBlocks(False, False, True)}, SIZES, **k),
        lambda: (dense(5, 7), events(), SUMMARIES, {"click": ROTATION, "impression": None}),
    ),
    "Kunlun": (
        lambda **k: Kunlun(5, 7, TOWERS, SIZES, **k),
        lambda: (dense(5, 7), events(), {"click": torch.arange(7) * 9000}),
    ),
    "RankingHead": (lambda **k: RankingHead(5, 7, **k), lambda: (dense(5, 7),)),
}
DENSE = ["KeyValueGeneration", "SumKronLinear", "WeightGeneration", "WukongExperts", "RankingHead"]
every_module = pytest.mark.parametrize("name", MODULES)


def flat(output: object) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, JaggedTensor):
        return [output.values()]
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in flat(part)]


def assert_equal(actual: object, expected: object) -> None:
    pairs = list(zip(flat(actual), flat(expected), strict=True))
    assert pairs
    for a, e in pairs:
        assert torch.equal(a, e)


@every_module
def test_meta_construction_then_reset_initialises_every_parameter(name):
    build, inputs = MODULES[name]
    meta = build(device="meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    module = meta.to_empty(device="cpu")
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(float("nan"))
    torch.manual_seed(0)
    module.reset_parameters()
    for parameter, p in module.named_parameters():
        assert p.isfinite().all(), parameter
    assert all(out.isfinite().all() for out in flat(module(*inputs())))


@every_module
def test_state_dict_round_trip_gives_the_same_bits(name):
    build, inputs = MODULES[name]
    torch.manual_seed(0)
    module, other = build(), build()
    assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    other.load_state_dict(module.state_dict())
    assert_equal(other(*inputs()), module(*inputs()))


@every_module
def test_fx_tracing_as_the_train_pipeline_does_it(name):
    build, inputs = MODULES[name]
    module = build()
    graph = Tracer(leaf_modules=[]).trace(module)
    traced = torch.fx.GraphModule(module, graph)
    assert_equal(traced(*inputs()), module(*inputs()))


class Events(nn.Module):
    """Embeddings and a stack as a user's model holds them."""

    def __init__(self) -> None:
        super().__init__()
        # One collection for each event type: the tables of a collection are equally wide.
        self.embedding = nn.ModuleDict(
            {
                name: EmbeddingCollection(
                    [EmbeddingConfig(name=name, embedding_dim=t.embed_dim, num_embeddings=20, feature_names=[name])]
                )
                for name, t in TOWERS.items()
            }
        )
        self.stack = Kunlun(5, 7, TOWERS, SIZES)
        self.head = RankingHead(5, 7)

    def forward(self, tokens: Tensor, features: KeyedJaggedTensor, timestamps: dict[str, Tensor]) -> Tensor:
        events = {name: self.embedding[name](features)[name] for name in TOWERS}
        return self.head(self.stack(tokens, events, timestamps))


def test_fx_tracing_beside_an_embedding_collection():
    torch.manual_seed(0)
    model = Events()
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["click", "impression"], values=torch.arange(11) + 3, lengths=torch.tensor([3, 0, 2, 4, 1, 1])
    )
    graph = Tracer(leaf_modules=["embedding.click", "embedding.impression"]).trace(model)
    assert "embedding.click" in [str(node.target) for node in graph.nodes if node.op == "call_module"]
    args = dense(5, 7), features, {"click": torch.arange(5)}
    assert_equal(torch.fx.GraphModule(model, graph)(*args), model(*args))


@pytest.mark.parametrize("name", DENSE)
def test_dense_parts_compile_without_a_graph_break(name):
    build, inputs = MODULES[name]
    module = build()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out, expected = flat(compiled(*inputs())), flat(module(*inputs()))
    sum(x.square().sum() for x in out).backward()
    for a, e in zip(out, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.slow
def test_weight_generation_compiles_with_inductor():
    module, x = WeightGeneration(5, 3, 7, 11), dense(5, 7)
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x))


@every_module
def test_float64_in_float64_out_and_autocast_runs(name):
    build, inputs = MODULES[name]
    module = build()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = flat(module(*inputs()))
    for out in outputs:
        assert out.isfinite().all()


def test_layout_objects_are_carried_through_the_stack():
    block = KunlunTransformerBlock(TOWERS["click"], FULL, 3, 7)
    x = history()
    assert block(x, dense(3, 7)).offsets() is x.offsets()


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_rotation_of_packed_rows_restarts_at_each_sequence(offsets_dtype):
    x = JaggedTensor(torch.zeros(8, 4), offsets=torch.tensor([0, 3, 3, 7], dtype=offsets_dtype))
    rotation = RotaryTemporalEmbedding(4)(x)
    angle = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0])[:, None] * torch.tensor([1.0, 0.01])  # the last row is of none
    torch.testing.assert_close(rotation, torch.stack([angle.cos(), angle.sin()]))


def test_gaps_of_unix_seconds_keep_their_precision():
    x = jagged(torch.zeros(2, 4), torch.tensor([2]))
    rotation = RotaryTemporalEmbedding(4)(x, torch.tensor([1_760_000_000, 1_760_000_001]))
    angle = 1 + torch.log1p(torch.tensor(1 / 86_400, dtype=torch.float64))
    assert abs(rotation[1, 1, 0].double() - angle.sin()) < torch.finfo(torch.float32).eps


@pytest.mark.parametrize("empty", [JaggedTensor.empty(), jagged(torch.zeros(0, 4), torch.tensor([0, 0]))])
def test_rotation_without_rows(empty):
    assert RotaryTemporalEmbedding(4)(empty).shape == (2, 0, 2)


@pytest.mark.parametrize("gap", ["previous", "to_last"])
def test_unsorted_timestamps_are_refused_with_the_row(gap):
    x = jagged(torch.zeros(5, 4), torch.tensor([2, 0, 3]))
    rotary = RotaryTemporalEmbedding(4, gap=gap)
    rotary(x, torch.tensor([5, 9, 1, 1, 2]))  # descending across sequences is in order
    with pytest.raises(ValueError, match=re.escape("timestamps must ascend in each sequence, got 3 after 8 in row 4.")):
        rotary(x, torch.tensor([5, 9, 1, 8, 3]))
    with pytest.raises(ValueError, match="got 3 after 8"):
        validate_timestamps_sync(x, torch.tensor([5, 9, 1, 8, 3]))


NAN, INF = float("nan"), float("inf")
ROWS = jagged(torch.zeros(5, 4), torch.tensor([2, 0, 3]))


@pytest.mark.parametrize(
    "check", [RotaryTemporalEmbedding(4), RotaryTemporalEmbedding(4, gap="to_last"), validate_timestamps_sync]
)
@pytest.mark.parametrize(
    ("timestamps", "error", "message"),
    [
        (torch.tensor([1, NAN, 1, 2, 3]), ValueError, "timestamps must be finite, got nan in row 1"),
        (torch.tensor([NAN, 1, 1, 2, 3]), ValueError, "timestamps must be finite, got nan in row 0"),
        (torch.tensor([1, 1, 1, 2, INF]), ValueError, "timestamps must be finite, got inf in row 4"),
        (torch.tensor([1, 2]), ValueError, r"timestamps must have shape \[5\], one a row of x, got \[2\]"),
        ([1, 2], TypeError, "timestamps must be a tensor or a torchrec.JaggedTensor, got list"),
        (
            JaggedTensor(torch.arange(5), lengths=torch.tensor([4, 1])),
            ValueError,
            "timestamps must have the 3 sequences of x, got 2",
        ),
        (
            JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 1, 3])),
            ValueError,
            r"timestamps must have the offsets of x, got offsets\[1\] = 1 in place of 2",
        ),
        (
            torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets=torch.tensor([0, 1, 5])),
            ValueError,
            "timestamps must have the 3 sequences of x, got 2",
        ),
        (
            JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 1, 3]).to("meta")),
            ValueError,
            "timestamps must have its lengths on the device of its values",
        ),
    ],
)
def test_timestamps_that_do_not_fit_are_refused_by_name(check, timestamps, error, message):
    with pytest.raises(error, match=message):
        check(ROWS, timestamps)


def test_a_single_nan_is_seen():
    with pytest.raises(ValueError, match="timestamps must be finite, got nan in row 0"):
        RotaryTemporalEmbedding(4)(jagged(torch.zeros(1, 4), torch.tensor([1])), torch.tensor([NAN]))


def test_jagged_timestamps_give_what_their_values_give():
    rotary, seconds = RotaryTemporalEmbedding(4), torch.tensor([5, 9, 1, 1, 2])
    expected = rotary(ROWS, seconds)
    for timestamps in (
        JaggedTensor(seconds, lengths=torch.tensor([2, 0, 3], dtype=torch.int32)),
        JaggedTensor(seconds, offsets=torch.tensor([0, 2, 2, 5])),
        torch.nested.nested_tensor_from_jagged(seconds, offsets=torch.tensor([0, 2, 2, 5])),
    ):
        validate_timestamps_sync(ROWS, timestamps)
        assert torch.equal(rotary(ROWS, timestamps), expected)


@pytest.mark.parametrize("check", [RotaryTemporalEmbedding(4), validate_timestamps_sync])
@pytest.mark.parametrize("x", [None, torch.zeros(5, 4), [1]])
def test_rotation_wants_a_jagged_tensor(check, x):
    with pytest.raises(TypeError, match=f"x must be a torchrec.JaggedTensor, got {type(x).__name__}"):
        check(x, torch.arange(5))


@pytest.mark.parametrize(
    ("heads", "rotation", "error", "message"),
    [
        (torch.zeros(7, 3, 3), ROTATION, ValueError, r"heads must have shape .* with an even D, got \[7, 3, 3\]"),
        (torch.zeros(7, 4), ROTATION, ValueError, r"heads must have shape .* with an even D, got \[7, 4\]"),
        (torch.zeros(7, 3, 4), ROTATION[:, :1], ValueError, r"rotation must have shape \[2, 7, 2\], got \[2, 1, 2\]"),
        (torch.zeros(7, 3, 4), ROTATION.int(), ValueError, "rotation must be floating, got torch.int32"),
        (torch.zeros(7, 3, 4), ROTATION.to("meta"), ValueError, "rotation must be on the device of heads, cpu, got me"),
        (torch.zeros(7, 3, 4), "r", TypeError, "rotation must be a torch.Tensor, got str"),
        ([1.0], ROTATION, TypeError, "heads must be a torch.Tensor, got list"),
    ],
)
def test_what_cannot_be_rotated_is_refused_by_name(heads, rotation, error, message):
    with pytest.raises(error, match=message):
        rotate(heads, rotation)
    if isinstance(heads, Tensor) and heads.dim() == 3:
        width = heads[0].numel()
        with pytest.raises(error, match=message):
            TemporalSelfAttention(width, 3)(history(width), rotation)


def test_an_odd_head_dim_attends_without_rotation():
    assert TemporalSelfAttention(9, 3)(history(9)).values().shape == (7, 9)


class Rotating(nn.Module):
    def forward(self, heads: Tensor, rotation: Tensor) -> Tensor:
        return rotate(heads, rotation)


def test_rotate_may_be_called_in_a_traced_model():
    traced, heads = torch.fx.symbolic_trace(Rotating()), torch.randn(7, 3, 4)
    assert torch.equal(traced(heads, ROTATION), rotate(heads, ROTATION))
    with pytest.raises(ValueError, match="heads must have shape"):
        traced(heads[..., :3], ROTATION)


def tower(**changes: object) -> EventTowerConfig:
    return EventTowerConfig(
        **{"embed_dim": 12, "num_heads": 3, "num_tokens": 2, "num_layers": 2, "window": 3, **changes}
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: tower(num_heads=5),
            ValueError,
            "num_heads must divide embed_dim = 12 unless head_dim is given, got 5",
        ),
        (lambda: tower(num_seeds=2), ValueError, "num_seeds must be more than num_tokens = 2, got 2"),
        (lambda: tower(window=0), ValueError, "window must be a positive int, got 0"),
        (lambda: tower(window="wide"), TypeError, "window must be a positive int, got 'wide'"),
        (lambda: tower(activation="softmax"), ValueError, "activation must be element-wise, got 'softmax'"),
        (lambda: tower(num_layers=0), ValueError, "num_layers must be a positive int, got 0"),
        (lambda: tower(embed_dim=9), ValueError, "head_dim must be a positive multiple of 2, got 3"),
        (lambda: HierarchicalSeedPooling(12, 3, 4, 4), ValueError, "num_seeds must be more than num_tokens = 4, got 4"),
        (lambda: HierarchicalSeedPooling(12, 5, 4, 2), ValueError, "num_heads must divide embed_dim = 12"),
        (lambda: HierarchicalSeedPooling(12, 3, 4, 2, norm="batch"), ValueError, "norm must be one of .*, got 'batch'"),
        (lambda: PersonalizedFeedForward(12, 5, 4), ValueError, "num_heads must divide embed_dim = 12"),
        (
            lambda: PersonalizedFeedForward(12, 3, 4, activation="softmax"),
            ValueError,
            "activation must be element-wise",
        ),
        (lambda: WukongExperts(5, 4, 7, 3), ValueError, "num_experts must be at most the 5 tokens in .* got 3"),
        (lambda: WukongExperts(5, 4, 7, 2, partition="random"), ValueError, "partition must be one of .* got 'random'"),
        (lambda: RotaryTemporalEmbedding(6, combine="split"), ValueError, "head_dim must be a positive multiple of 4"),
        (lambda: RotaryTemporalEmbedding(4, gap="next"), ValueError, "gap must be one of 'previous', 'to_last'"),
        (
            lambda: RotaryTemporalEmbedding(4, time_scale=0.0),
            ValueError,
            "time_scale must be a positive number, got 0.0",
        ),
        (lambda: RotaryTemporalEmbedding(4, base="x"), TypeError, "base must be a float, got str"),
        (lambda: RotaryTemporalEmbedding(4, base=INF), ValueError, "base must be finite, got inf"),
        (lambda: RotaryTemporalEmbedding(4, time_scale=10**400), ValueError, "time_scale must be finite as a float"),
        (lambda: PersonalizedFeedForward(12, 3, 4, scale=10**400), ValueError, "scale must be finite as a float"),
        (lambda: tower(window=Mask()), TypeError, r"window must be Full.* got Mask\(\)"),
        (lambda: InteractionConfig(partition="zz"), ValueError, "partition must be one of .* got 'zz'"),
        (lambda: Kunlun(5, 7, TOWERS, "small"), TypeError, "config must be an InteractionConfig, got str"),
        (lambda: WukongLayer(5, 7, num_fmb=2, num_lcb=1, eps="x"), TypeError, "eps must be a float, got str"),
        *(
            (lambda make=make, name=name: make(**{name: "no"}), TypeError, f"{name} must be True or False, got 'no'")
            for make, names in (
                (tower, ("rotary", "rotate_values")),
                (lambda **k: PersonalizedFeedForward(12, 3, 4, **k), ("norm_weights",)),
                (lambda **k: HierarchicalSeedPooling(12, 3, 4, 2, **k), ("out_proj", "residual")),
                (lambda **k: TemporalSelfAttention(12, 3, **k), ("bias", "rotate_values")),
                (lambda **k: Kunlun(5, 7, TOWERS, SIZES, **k), ("comp_skip", "closing_pool")),
            )
            for name in names
        ),
        (lambda: Kunlun(5, 7, {}), ValueError, "towers must hold at least one event type"),
        *(
            (
                lambda name=name, build=build: build({name: TOWERS["click"]}),
                ValueError,
                f"towers must have event types that can name a module, .* got {name!r}",
            )
            for name in ("items", "type", "keys", "training", "a.b", "")
            for build in (
                lambda towers: Kunlun(5, 7, towers),
                lambda towers: KunlunLayer(5, 7, towers, dict.fromkeys(towers, FULL), SIZES),
            )
        ),
        (lambda: Kunlun(5, 7, {3: TOWERS["click"]}), TypeError, "towers must have strings as event types, got 3"),
        (lambda: Kunlun(5, 7, [TOWERS["click"]]), TypeError, "towers must be a mapping by event type, got list"),
        (lambda: Kunlun(5, 7, {"click": 3}), TypeError, "towers must hold EventTowerConfig, got int for 'click'"),
        (
            lambda: Kunlun(5, 7, TOWERS, SIZES, pattern=("local", "global", "local")),
            ValueError,
            "pattern must begin with a layer that pools, global or full, got .'local'",
        ),
        (lambda: Kunlun(5, 7, TOWERS, SIZES, pattern=("global",)), ValueError, "one kind for each of the 3 layers"),
        (lambda: Kunlun(5, 7, TOWERS, SIZES, pattern=("global", "wide", "local")), ValueError, "got 'wide' at layer 1"),
    ],
)
def test_bad_configuration_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


STACK = Kunlun(5, 7, TOWERS, SIZES)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": torch.zeros(3, 4, 7)}, ValueError, r"tokens must have shape \[B, 5, 7\], got \[3, 4, 7\]"),
        ({"tokens": torch.zeros(2, 5, 7)}, ValueError, r"events\['click'\] must be of the 2 samples of tokens, got 3"),
        ({"tokens": None}, TypeError, "tokens must be a torch.Tensor, got NoneType"),
        ({"tokens": dense(5, 7).double()}, ValueError, "tokens must have values of .* got torch.float64"),
        ({"tokens": dense(5, 7).to("meta")}, ValueError, "tokens must be on the module's device cpu, got meta"),
        ({"events": None}, TypeError, "events must be a mapping by event type, got NoneType"),
        ({"events": [history()]}, TypeError, "events must be a mapping by event type, got list"),
        (
            {"events": {**events(), "clik": history()}},
            ValueError,
            r"events must be for the towers \['click', 'impression'\] alone, got event type 'clik'",
        ),
        (
            {"timestamps": {"clik": torch.arange(7)}},
            ValueError,
            r"timestamps must be for the towers \['click', 'impression'\] alone, got event type 'clik'",
        ),
        ({"timestamps": [torch.arange(7)]}, TypeError, "timestamps must be a mapping by event type, got list"),
        ({"timestamps": torch.arange(7)}, TypeError, "timestamps must be a mapping by event type, got Tensor"),
        ({"events": {"click": history()}}, ValueError, r"events must have event type 'impression', got \['click'\]"),
        (
            {"events": {**events(), "click": dense(4, 12)}},
            TypeError,
            r"events\['click'\] must be a torchrec.JaggedTens",
        ),
        ({"timestamps": {"click": torch.arange(6)}}, ValueError, r"timestamps must have shape \[7\].*got \[6\]"),
        (
            {"timestamps": {"click": torch.arange(7).half()}},
            ValueError,
            "timestamps must be int32, .* got torch.float16",
        ),
        ({"timestamps": {"click": [1] * 7}}, TypeError, "timestamps must be a tensor .* got list"),
    ],
)
def test_bad_input_is_refused_by_name(changes, error, message):
    arguments = {"tokens": dense(5, 7), "events": events(), "timestamps": None, **changes}
    with pytest.raises(error, match=message):
        STACK(**arguments)


FEED_FORWARD = MODULES["PersonalizedFeedForward"][0]()


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (lambda: dense(4, 6), ValueError, r"context must have shape \[B, 4, 7\], got \[3, 4, 6\]"),
        (lambda: dense(3, 7), ValueError, r"context must have shape \[B, 4, 7\], got \[3, 3, 7\]"),
        (lambda: dense(7), ValueError, r"context must have shape \[B, 4, 7\], got \[3, 7\]"),
        (lambda: dense(4, 7)[:2], ValueError, "context must be for the 3 samples of x, got 2"),
        (
            lambda: dense(4, 7).double(),
            ValueError,
            "context must have values of the module's dtype torch.float32, got torch.float64; convert one of the two.$",
        ),
        (lambda: dense(4, 7).to("meta"), ValueError, "context must be on the module's device cpu, got meta"),
        (lambda: None, TypeError, "context must be a torch.Tensor, got NoneType"),
    ],
)
def test_a_context_that_does_not_fit_is_refused_by_name(context, error, message):
    with pytest.raises(error, match=message):
        FEED_FORWARD(history(), context())


OF_ROWS = ["PersonalizedFeedForward", "SeedPooling", "HierarchicalSeedPooling", "TemporalSelfAttention"]
of_rows = pytest.mark.parametrize("name", [*OF_ROWS, "KunlunTransformerBlock"])


@of_rows
def test_rows_of_another_dtype_or_device_are_refused_by_name(name):
    build, inputs = MODULES[name]
    module, (x, *others) = build(), inputs()
    for other, words in [
        (torch.float64, "must have values of the module's dtype torch.float32, got torch.float64; convert one of the"),
        (torch.bfloat16, "must have values of .* got torch.bfloat16; convert one of the two or run under torch.autoc"),
        ("meta", "must be on the module's device cpu, got meta"),
    ]:
        values, lengths = x.values().to(other), LENGTHS.to("meta") if other == "meta" else LENGTHS
        with pytest.raises(ValueError, match=f"(x|query|history) {words}"):
            module(JaggedTensor(values, lengths=lengths), *others)


@of_rows
def test_autocast_is_no_way_for_float64(name):
    build, inputs = MODULES[name]
    double, (x, *others) = build().double(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        doubled = [other.double() for other in others]
        for module, values, rest in ((build(), x.values().double(), others), (double, x.values(), doubled)):
            with pytest.raises(ValueError, match=r"(x|query|history) must have values .*float64.* one of the two.$"):
                module(jagged(values, LENGTHS), *rest)
        assert flat(double(jagged(x.values().double(), LENGTHS), *doubled))[0].dtype == torch.float64


def test_stacked_wukong_layers_compile_with_gradients_in_the_order_that_the_compiler_expects():
    """PyTorch 2.13 and before mistake the strides of LayerNorm's gradient where that of its result is transposed."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(WukongLayer(n, 8, num_fmb=2, num_lcb=1) for n in (5, 3, 3)))
    x = torch.randn(4, 5, 8)
    results = []
    for model in (layers, torch.compile(layers, fullgraph=True, backend="aot_eager")):
        results.append(torch.autograd.grad(model(x).square().sum(), list(layers.parameters())))
    torch.testing.assert_close(*results)
    torch._dynamo.reset()
