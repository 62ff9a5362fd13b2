"""Attention over jagged sequences, for ads and recommendation models.

Start with ``JaggedMultiHeadAttention`` and ``JaggedTargetAttention``, which take and return TorchRec jagged tensors, or
with the functions under them, ``jagged_attention`` and ``broadcast_q_attention``. Importing this imports torch alone.
"""

from .errors import BackendReport as BackendReport
from .errors import JaggedAttentionError as JaggedAttentionError
from .errors import UnsupportedError as UnsupportedError
from .functional import broadcast_q_attention as broadcast_q_attention
from .functional import explain_backend as explain_backend
from .functional import jagged_attention as jagged_attention
from .jagged_tensor import with_values as with_values
from .layout import JaggedLayout as JaggedLayout
from .masks import BlockDiagonal as BlockDiagonal
from .masks import Causal as Causal
from .masks import Full as Full
from .masks import Mask as Mask
from .masks import SlidingWindow as SlidingWindow
from .modules import EventTowerConfig as EventTowerConfig
from .modules import HierarchicalSeedPooling as HierarchicalSeedPooling
from .modules import InteractionConfig as InteractionConfig
from .modules import JaggedMultiHeadAttention as JaggedMultiHeadAttention
from .modules import JaggedTargetAttention as JaggedTargetAttention
from .modules import Kunlun as Kunlun
from .modules import KunlunInteractionBlock as KunlunInteractionBlock
from .modules import KunlunLayer as KunlunLayer
from .modules import KunlunTransformerBlock as KunlunTransformerBlock
from .modules import PersonalizedFeedForward as PersonalizedFeedForward
from .modules import RankingHead as RankingHead
from .modules import RotaryTemporalEmbedding as RotaryTemporalEmbedding
from .modules import SeedPooling as SeedPooling
from .modules import SumKronLinear as SumKronLinear
from .modules import TemporalSelfAttention as TemporalSelfAttention
from .modules import WeightGeneration as WeightGeneration
from .modules import WukongExperts as WukongExperts
from .modules import WukongLayer as WukongLayer
from .modules import validate_timestamps_sync as validate_timestamps_sync

__version__ = "0.1.0"
