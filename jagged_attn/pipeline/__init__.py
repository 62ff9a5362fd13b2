"""The edge to TorchRec's train pipelines: batches that they move, and layouts and tile tables made one batch ahead.

Imports TorchRec, which ``import jagged_attn`` does not.
"""

from .batch import JaggedBatch as JaggedBatch
from .stage import AttentionCall as AttentionCall
from .stage import LayoutStage as LayoutStage
