"""The attention layers: ``nn.Module``s over jagged tensors."""

from .projections import HeadNorm as HeadNorm
from .self_attention import JaggedMultiHeadAttention as JaggedMultiHeadAttention
from .target_attention import JaggedTargetAttention as JaggedTargetAttention
