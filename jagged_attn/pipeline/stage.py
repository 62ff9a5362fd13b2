"""``LayoutStage``: the preparation of a model's attention calls, made on the copy stream one batch ahead."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from ..activations import normalize_activation
from ..functional import prepare_tables
from ..layout import JaggedLayout
from ..spec import AttentionSpec, Kind
from .batch import JaggedBatch


@dataclass(frozen=True)
class AttentionCall:
    """What is known of an attention call of a model before its inputs are.

    Args:
        keys: the feature whose layout keys and values have.
        queries: ``None``: the same rows are the queries; a feature: queries with that feature's layout; a number S:
            S queries that all sequences share.
        spec: the call's static facts.
        backend: as the layer has it.

    Example:
        >>> from jagged_attn import JaggedTargetAttention
        >>> call = AttentionCall.of(JaggedTargetAttention(32, 2), keys="clicks", queries="candidates")
        >>> call.spec.kind, call.spec.head_dim
        ('cross', 16)
    """

    keys: str
    queries: str | int | None
    spec: AttentionSpec
    backend: str = "auto"

    @classmethod
    def of(
        cls, module: nn.Module, keys: str, queries: str | int | None = None, dtype: torch.dtype | None = None
    ) -> "AttentionCall":
        """The call of a ``JaggedMultiHeadAttention`` or ``JaggedTargetAttention``.

        Args:
            module: the layer.
            keys: see ``AttentionCall``.
            queries: see ``AttentionCall``; learned queries are known from the layer.
            dtype: in which the layer will compute, such as autocast's; ``None``: its parameters'.

        Raises:
            TypeError: ``module`` is another kind of layer, which needs a spec of its own.
        """
        heads, options = getattr(module, "heads", None), getattr(module, "options", None)
        if heads is None or options is None:
            raise TypeError(
                "module must be a JaggedMultiHeadAttention or JaggedTargetAttention, got "
                f"{type(module).__name__}; give AttentionCall a spec instead."
            )
        learned = cast(Any, getattr(module, "num_queries", None))
        queries = queries if learned is None else learned
        kind: Kind = "self" if queries is None else "cross" if isinstance(queries, str) else "broadcast_q"
        spec = AttentionSpec(
            kind=kind,
            dtype=next(module.parameters()).dtype if dtype is None else dtype,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            value_head_dim=heads.head_dim,
            mask=options.mask,
            activation=normalize_activation(options.activation, heads.num_heads),
            scale=heads.head_dim**-0.5 if options.scale is None else options.scale,
            out_scale=1.0,
            deterministic=False,
        )
        return cls(keys, queries, spec, options.backend)

    @property
    def features(self) -> tuple[str, ...]:
        """The features whose layouts the call reads."""
        return (self.keys, self.queries) if isinstance(self.queries, str) else (self.keys,)


class LayoutStage:
    """Makes a batch's layouts, and the tile tables of a model's attention calls on them.

    The tables are kept beside the layouts' offsets, where the calls look for them: a forward pass on these layouts,
    which a model takes from the batch by ``to_jagged_tensor(embedded.values(), batch.layouts[key])``, makes none. They
    are those of the backend that the call will choose, on whatever stream is current, without waiting for the device.
    The backends ``eager`` and ``reference`` have no tables, and plan in their forward passes.

    Args:
        calls: the attention calls of the model; equal ones count once.
        features: further features whose layouts the model wants.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> from jagged_attn import JaggedMultiHeadAttention
        >>> layer = JaggedMultiHeadAttention(32, 2)
        >>> stage = LayoutStage([AttentionCall.of(layer, keys="clicks")])
        >>> ids = KeyedJaggedTensor.from_lengths_sync(["clicks"], torch.arange(5), torch.tensor([2, 0, 3]))
        >>> batch = JaggedBatch(ids, labels=torch.ones(3), stage=stage).to(torch.device("cpu"))
        >>> batch.layouts["clicks"].offsets
        tensor([0, 2, 2, 5])
    """

    def __init__(self, calls: Iterable[AttentionCall], features: Iterable[str] = ()) -> None:
        self.calls = tuple(dict.fromkeys(calls))
        self.features = tuple(dict.fromkeys([name for call in self.calls for name in call.features] + list(features)))

    def __call__(self, batch: JaggedBatch) -> JaggedBatch:
        """The batch with ``layouts`` and ``tables``.

        Args:
            batch: on the device where the model will run. If its features do not know how many rows each key has,
                which ``JaggedBatch.to`` sees to, this waits for the device.

        Raises:
            ValueError: it lacks a feature.
            UnsupportedError: no backend runs one of the calls.
        """
        keys = batch.features.keys()
        missing = [name for name in self.features if name not in keys]
        if missing:
            raise ValueError(f"features must have the keys {list(self.features)}, got {keys}.")
        rows = dict(zip(keys, batch.features.length_per_key(), strict=True))
        layouts = {name: JaggedLayout.from_lengths(_lengths(batch.features, name)) for name in self.features}
        tables: dict[int, Tensor] = {}
        for call in self.calls:
            layout_q: JaggedLayout | None
            if isinstance(call.queries, int):
                layout_q, rows_q = None, call.queries
            else:
                name = call.keys if call.queries is None else call.queries
                layout_q, rows_q = layouts[name], rows[name]
            made = prepare_tables(call.spec, call.backend, layout_q, layouts[call.keys], rows_q, rows[call.keys])
            tables.update((id(table), table) for table in made)
        return replace(batch, layouts=layouts, tables=tuple(tables.values()))


def _lengths(features: KeyedJaggedTensor, key: str) -> Tensor:
    index, strides = features.keys().index(key), features.stride_per_key()
    start = sum(strides[:index])
    return features.lengths()[start : start + strides[index]]
