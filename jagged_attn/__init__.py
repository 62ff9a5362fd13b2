"""Attention over jagged sequences, for ads and recommendation models."""

from .errors import BackendReport as BackendReport
from .errors import JaggedAttentionError as JaggedAttentionError
from .errors import UnsupportedError as UnsupportedError
from .functional import broadcast_q_attention as broadcast_q_attention
from .functional import explain_backend as explain_backend
from .functional import jagged_attention as jagged_attention
from .layout import JaggedLayout as JaggedLayout
from .masks import BlockDiagonal as BlockDiagonal
from .masks import Causal as Causal
from .masks import Full as Full
from .masks import Mask as Mask
from .masks import SlidingWindow as SlidingWindow

__version__ = "0.1.0"
