"""How the Hopper backward of self and cross attention makes dQ."""

from ..masks import Mask
from .hopper import keys_seen

# Where a query sees no more keys than this, on average or because of the mask, dQ is a kernel of its own: it computes
# two products in seven anew, which then costs less than a sum that is zeroed, added to and rounded. By head dim;
# measured on an H200 (docs/performance-log.md): at 128 self-attention of up to 512 rows gains 4 %, 256 keys 13 to 20 %,
# a window of 201 keys 8 to 10 %, and 1,024 rows lose 6 %; at 64 it is never faster.
_FEW_KEYS = {64: 0, 128: 320}


def adds_up_dq(head_dim: int, mask: Mask, rows_kv: int, num_sequences: int) -> bool:
    """Whether tiles of keys add up dQ in memory, in the order in which they end; else it is a kernel of its own.

    Args:
        head_dim: D, 64 or 128.
        mask: of the call.
        rows_kv: T_kv, rows of keys of all sequences.
        num_sequences: B.
    """
    limit = _FEW_KEYS[head_dim]
    seen = keys_seen(mask)
    return rows_kv > limit * num_sequences and (seen is None or seen > limit)
