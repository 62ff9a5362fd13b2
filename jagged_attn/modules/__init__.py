"""The attention layers: ``nn.Module``s over jagged tensors."""

from .gdpa import KeyValueGeneration as KeyValueGeneration
from .gdpa import PersonalizedFeedForward as PersonalizedFeedForward
from .kunlun import Kunlun as Kunlun
from .kunlun import KunlunLayer as KunlunLayer
from .kunlun_blocks import KunlunInteractionBlock as KunlunInteractionBlock
from .kunlun_blocks import KunlunTransformerBlock as KunlunTransformerBlock
from .kunlun_blocks import RankingHead as RankingHead
from .kunlun_blocks import WeightGeneration as WeightGeneration
from .kunlun_config import EventTowerConfig as EventTowerConfig
from .kunlun_config import InteractionConfig as InteractionConfig
from .kunlun_config import SubBlocks as SubBlocks
from .projections import HeadNorm as HeadNorm
from .rotary import RotaryTemporalEmbedding as RotaryTemporalEmbedding
from .rotary import TemporalSelfAttention as TemporalSelfAttention
from .rotary import rotate as rotate
from .rotary import validate_timestamps_sync as validate_timestamps_sync
from .seed_pooling import HierarchicalSeedPooling as HierarchicalSeedPooling
from .seed_pooling import SeedPooling as SeedPooling
from .seed_pooling import SumKronLinear as SumKronLinear
from .self_attention import JaggedMultiHeadAttention as JaggedMultiHeadAttention
from .target_attention import JaggedTargetAttention as JaggedTargetAttention
from .wukong import TokenLinear as TokenLinear
from .wukong import WukongExperts as WukongExperts
from .wukong import WukongLayer as WukongLayer
