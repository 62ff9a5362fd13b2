"""What the tests of the modules share: jagged inputs, and attention written anew on padded tensors."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from jagged_attn.activations import ELEMENTWISE

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have.
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

__all__ = ["EmbeddingCollection", "EmbeddingConfig", "JaggedTensor", "KeyedJaggedTensor"]

# 0, 1 and both sides of the block sizes in use, with empty sequences first, last and in a row.
LENGTHS = (0, 1, 31, 32, 33, 0, 0, 63, 65, 0)
OTHER_LENGTHS = (3, 0, 17, 40, 1, 5, 0, 33, 64, 0)
BACKEND = "auto"


def jagged(lengths: tuple[int, ...], width: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A JaggedTensor with normal values that require gradients, given by its lengths alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return JaggedTensor(values, lengths=torch.tensor(lengths, dtype=torch.int64))


def randomize(module: nn.Module, seed: int = 1) -> nn.Module:
    """Give every parameter normal numbers, biases and norms included, so that none is invisible."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + 0.1)
    return module


def pad(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``[B, max L, ...]``: the sequences with zeros behind them."""
    return nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True)


def unpad(padded: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The inverse of ``pad``."""
    return torch.cat([rows[:n] for rows, n in zip(padded, lengths, strict=True)])


def is_row(lengths: tuple[int, ...]) -> Tensor:
    """``[B, max L]``: which rows of a padded tensor are real."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · w`` over the last dimension; x itself without a weight."""
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, activations: tuple[str, ...], scale: float
) -> Tensor:
    """Attention on padded tensors, one head at a time.

    Args:
        q: ``[B, L_q, H, D]``.
        k: ``[B, L_kv, H_kv, D]``.
        v: ``[B, L_kv, H_kv, D]``.
        allowed: ``[B, L_q, L_kv]``.
        activations: one name a head.
        scale: factor of the scores.

    Returns:
        ``[B, L_q, H D]``; 0 for queries without a key.
    """
    heads = []
    for h, name in enumerate(activations):
        h_kv = h * k.shape[2] // q.shape[2]
        scores = scale * torch.einsum("bid,bjd->bij", q[:, :, h], k[:, :, h_kv])
        if name == "softmax":
            weights = scores.masked_fill(~allowed, -1e30).softmax(-1)
        else:
            weights = ELEMENTWISE[name].value(scores)
        heads.append(torch.einsum("bij,bjd->bid", weights * allowed, v[:, :, h_kv]))
    return torch.cat(heads, dim=-1)


def gradients(loss: Tensor, module: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Gradients of a loss for the module's parameters and for the values of the inputs."""
    leaves = dict(module.named_parameters())
    leaves |= {f"input {i}": x if isinstance(x, Tensor) else x.values() for i, x in enumerate(inputs)}
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor of a float64 computation agrees with another order of the same sums."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )
