"""What the attention modules share: the options that travel to the functional core, and the checks of their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import dispatch, validation
from ..activations import normalize_activation
from ..masks import Mask, parse_mask


@dataclass(frozen=True)
class AttentionOptions:
    """The static keywords of a module's call to the functional core, checked once.

    Attributes:
        mask: what may attend to what.
        activation: one name for all heads, or one a head.
        scale: factor of the scores; None: ``D ** -0.5``.
        backend: a backend's name or ``"auto"``.
    """

    mask: Mask
    activation: str | tuple[str, ...]
    scale: float | None
    backend: str

    @classmethod
    def checked(
        cls, num_heads: int, mask: Mask, activation: str | Sequence[str], scale: float | None, backend: str
    ) -> "AttentionOptions":
        """The options, or the error that the functional core would raise at the first call."""
        validation.check_mask("mask", mask)
        names = normalize_activation(activation, num_heads)
        dispatch.check_name(backend)
        scale = None if scale is None else validation.check_number("scale", scale)
        return cls(mask, names[0] if len(names) == 1 else names, scale, backend)

    def keywords(self) -> dict[str, Any]:
        """As keywords of ``jagged_attention`` and ``broadcast_q_attention``."""
        return {"mask": self.mask, "activation": self.activation, "scale": self.scale, "backend": self.backend}

    def extra_repr(self) -> str:
        """The options that differ from the defaults, after the mask, as a module prints them."""
        shown = [f"mask={self.mask}"]
        shown += [f"activation={self.activation!r}"] if self.activation != "softmax" else []
        shown += [f"scale={self.scale}"] if self.scale is not None else []
        shown += [f"backend={self.backend!r}"] if self.backend != "auto" else []
        return ", ".join(shown)

    def __fx_create_arg__(self, tracer: torch.fx.Tracer) -> torch.fx.Node:
        """A node that makes the options anew: a graph holds strings and numbers, not objects of this library."""
        args = (self.mask.code, self.activation, self.scale, self.backend)
        return tracer.create_node("call_function", options_from_code, args, {})


def options_from_code(
    mask: str, activation: str | tuple[str, ...], scale: float | None, backend: str
) -> AttentionOptions:
    """The options whose mask has this code; traced graphs call it."""
    return AttentionOptions(parse_mask(mask), activation, scale, backend)


@dataclass(frozen=True)
class Heads:
    """The sizes of a multi-head attention, checked.

    Attributes:
        num_heads: H, of the queries.
        num_kv_heads: H_kv, of keys and values; divides H.
        head_dim: D, of all heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def checked(cls, embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> "Heads":
        """Fill in the defaults, ``num_kv_heads = num_heads`` and ``head_dim = embed_dim / num_heads``, and check."""
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}.")
        if head_dim is None:
            head_dim, rest = divmod(embed_dim, num_heads)
            if rest:
                raise ValueError(
                    f"num_heads must divide embed_dim = {embed_dim} unless head_dim is given, got {num_heads}."
                )
        return cls(num_heads, num_kv_heads, head_dim)

    @property
    def q_width(self) -> int:
        """H · D."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """H_kv · D."""
        return self.num_kv_heads * self.head_dim

    def extra_repr(self) -> str:
        """The sizes, as a module prints them."""
        kv = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"num_heads={self.num_heads}{kv}, head_dim={self.head_dim}"


def check_sizes(**sizes: int | None) -> None:
    """Raise unless every size is a positive int or None; messages name the keyword."""
    for name, size in sizes.items():
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be a positive int, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be a positive int, got {size}.")
