"""``JaggedBatch``: a batch that TorchRec's train pipelines move between devices and streams."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from ..layout import JaggedLayout

Stage = Callable[["JaggedBatch"], "JaggedBatch"]


@dataclass(frozen=True, eq=False)
class JaggedBatch(Pipelineable):
    """Ids, dense tensors and labels of one batch; TorchRec's ``Pipelineable``.

    A pipeline copies a batch one or two steps before the model reads it, on a stream of its own. ``to`` runs the stage
    there, so what the stage makes is ready when the forward pass begins, and ``record_stream`` covers it too.

    A model that is to be pipelined gives ``batch.features`` to its ``EmbeddingCollection`` as it is: TorchRec follows
    attributes of the batch, and nothing else, to the inputs of sharded modules.

    Args:
        features: ids by key.
        labels: whatever the loss compares with.
        dense: further tensors, by name.
        stage: what to do to a batch that has just arrived on a device, such as a ``LayoutStage``.
        layouts: where the sequences of a feature begin and end, by key; made by a ``LayoutStage``.
        tables: what else the stage made and the forward pass will find beside the layouts' offsets.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> ids = KeyedJaggedTensor.from_lengths_sync(["clicks"], torch.arange(5), torch.tensor([2, 0, 3]))
        >>> batch = JaggedBatch(ids, labels=torch.ones(3)).to(torch.device("cpu"))
        >>> batch.features["clicks"].lengths()
        tensor([2, 0, 3])
    """

    features: KeyedJaggedTensor
    labels: Tensor
    dense: Mapping[str, Tensor] = field(default_factory=dict)
    stage: Stage | None = None
    layouts: Mapping[str, JaggedLayout] = field(default_factory=dict)
    tables: tuple[Tensor, ...] = ()

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedBatch":
        """The batch on ``device``, after its stage.

        Args:
            device: where to.
            non_blocking: whether copies from pinned memory may go on after this returns.
        """
        # Known on the host for as long as the lengths are there; on a GPU, whoever asked first would wait for them.
        self.features.length_per_key()
        moved = replace(
            self,
            features=self.features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            dense={name: x.to(device, non_blocking=non_blocking) for name, x in self.dense.items()},
            layouts={},
            tables=(),
        )
        return moved if self.stage is None else self.stage(moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses the batch and what its stage made."""
        self.features.record_stream(stream)
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def pin_memory(self) -> "JaggedBatch":
        """The batch in page-locked host memory, from which copies do not hold up the host; before ``to``."""
        # TorchRec's pin_memory keeps what is known of the keys only if it was computed before.
        self.features.length_per_key()
        return replace(
            self,
            features=self.features.pin_memory(),
            labels=self.labels.pin_memory(),
            dense={name: x.pin_memory() for name, x in self.dense.items()},
            layouts={},
            tables=(),
        )

    def _tensors(self) -> Iterator[Tensor]:
        yield self.labels
        yield from self.dense.values()
        yield from (layout.offsets for layout in self.layouts.values())
        yield from self.tables
