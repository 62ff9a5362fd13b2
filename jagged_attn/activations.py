"""Activations: softmax, and the element-wise functions that take its place in GDPA.

``ELEMENTWISE`` is the definition that every backend is tested against: a formula and its derivative in PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SOFTMAX = "softmax"
_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
# gelu_tanh(x) = x/2 (1 + tanh(a (x + b x^3))): Hendrycks & Gimpel, arXiv 1606.08415, section 2.
_GELU_A = math.sqrt(2.0 / math.pi)
_GELU_B = 0.044715


class Elementwise(NamedTuple):
    """An activation f and its derivative f', both element-wise on a floating tensor."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * _SQRT_HALF))


def _gelu_derivative(x: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(x * _SQRT_HALF)) + x * _INV_SQRT_2PI * torch.exp(-0.5 * x * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_GELU_A * (x + _GELU_B * x**3)))


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    t = torch.tanh(_GELU_A * (x + _GELU_B * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _GELU_A * (1.0 + 3.0 * _GELU_B * x * x)


def _silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _leaky_relu_derivative(x: Tensor) -> Tensor:
    # A tensor among the two: numbers alone would be of the default dtype.
    return torch.where(x > 0, x.new_ones(()), 0.01)


def _hardswish(x: Tensor) -> Tensor:
    return x * (x + 3.0).clamp(0.0, 6.0) / 6.0


def _hardswish_derivative(x: Tensor) -> Tensor:
    return torch.where(x >= 3.0, 1.0, torch.where(x <= -3.0, 0.0, x / 3.0 + 0.5))


_GELU_TANH = Elementwise(_gelu_tanh, _gelu_tanh_derivative)
_SILU = Elementwise(lambda x: x * torch.sigmoid(x), _silu_derivative)

# At a kink the derivative is that of the left side, as in PyTorch (relu'(0) = 0).
# fast_gelu and fast_silu name the same formulas; a backend may evaluate them with the hardware's tanh.
ELEMENTWISE: dict[str, Elementwise] = {
    "identity": Elementwise(lambda x: x, torch.ones_like),
    "relu": Elementwise(lambda x: x.clamp_min(0.0), lambda x: (x > 0).to(x.dtype)),
    "relu_square": Elementwise(lambda x: x.clamp_min(0.0) ** 2, lambda x: 2.0 * x.clamp_min(0.0)),
    "leaky_relu": Elementwise(lambda x: torch.where(x > 0, x, 0.01 * x), _leaky_relu_derivative),
    "gelu": Elementwise(_gelu, _gelu_derivative),
    "gelu_tanh": _GELU_TANH,
    "silu": _SILU,
    "hardswish": Elementwise(_hardswish, _hardswish_derivative),
    "fast_gelu": _GELU_TANH,
    "fast_silu": _SILU,
}
ACTIVATIONS: tuple[str, ...] = (SOFTMAX, *ELEMENTWISE)


def normalize_activation(activation: str | Sequence[str], num_heads: int) -> tuple[str, ...]:
    """One name for all heads, as ``(name,)``, or one name a head.

    Args:
        activation: a name, or a sequence with a name for each of the ``num_heads`` heads.
        num_heads: H.

    Raises:
        TypeError: ``activation`` is neither a string nor a sequence of strings.
        ValueError: a name is not known, or there are not ``num_heads`` of them.
    """
    names = (activation,) if isinstance(activation, str) else activation
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"activation must be a name or a tuple of names, one a head, got {activation!r}.")
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}.")
    if isinstance(activation, str):
        return (activation,)
    if len(names) != num_heads:
        raise ValueError(f"activation must have one name for each of the {num_heads} heads, got {len(names)} names.")
    return (names[0],) if len(set(names)) == 1 else tuple(names)
