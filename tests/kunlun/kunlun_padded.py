"""The blocks once more, written from their formulas in plain PyTorch on padded tensors; nothing here is jagged.

Every function takes the parameters as a dict of tensors named as in the module's state dict, so that both formulations
are differentiated with respect to the same leaves, in any dtype.
"""

import math

import torch
from torch import Tensor

Params = dict[str, Tensor]


def sub(p: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix + "."): x for name, x in p.items() if name.startswith(prefix + ".")}


def linear(p: Params, x: Tensor) -> Tensor:
    y = torch.einsum("...e,fe->...f", x, p["weight"])
    return y + p["bias"] if "bias" in p else y


def layer_norm(p: Params, x: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y * p["weight"] + p["bias"] if p else y


def rms_norm(p: Params, x: Tensor, eps: float = 1e-5) -> Tensor:
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y * p["weight"] if p else y


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def two_layers(p: Params, x: Tensor) -> Tensor:
    return linear(sub(p, "2"), gelu(linear(sub(p, "0"), x)))


def heads(x: Tensor, num_heads: int) -> Tensor:
    """``[B, L, H D]`` to ``[B, H, L, D]``."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """``[B, H, L_q, D]``; a query without an allowed key gives 0."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = torch.where(allowed, (scores - scores.amax(-1, keepdim=True).detach()).exp(), 0)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhqk,bhkd->bhqd", weights / torch.where(total > 0, total, 1), v)
    return out.transpose(1, 2).flatten(2)


def exists(lengths: Tensor, longest: int) -> Tensor:
    """``[B, L]``: whether the position holds a row."""
    return torch.arange(longest) < lengths[:, None]


def feed_forward(
    p: Params, s: Tensor, context: Tensor, num_heads: int, activation: list[str], scale: float = 1.0
) -> Tensor:
    functions = {"gelu": gelu, "relu": lambda x: x.clamp_min(0), "silu": lambda x: x / (1 + (-x).exp())}
    x = layer_norm(sub(p, "norm"), s)
    made = linear(sub(p, "generate.proj"), context)
    key, value = made[..., : s.shape[-1]], made[..., s.shape[-1] :]
    k, v = (
        heads(torch.einsum("mn,bne->bme", p["generate.token_mix"][i], y), num_heads) for i, y in ((0, key), (1, value))
    )
    scores = scale * torch.einsum("bhqd,bhkd->bhqk", heads(x, num_heads), k)
    act = torch.stack([functions[name](scores[:, h]) for h, name in enumerate(activation)], dim=1)
    o = torch.einsum("bhqk,bhkd->bhqd", act, v).transpose(1, 2).flatten(2) + x
    return rms_norm(sub(p, "out_norm"), o) + s


def target_attention(p: Params, queries: Tensor, history: Tensor, lengths: Tensor, num_heads: int) -> Tensor:
    """``[B, S, E]`` of shared queries ``[S, E]``."""
    q = linear(sub(p, "q_proj"), queries).expand(len(lengths), -1, -1)
    k, v = linear(sub(p, "kv_proj"), history).chunk(2, dim=-1)
    allowed = exists(lengths, history.shape[1])[:, None, None, :].expand(-1, num_heads, q.shape[1], -1)
    out = softmax_attention(*(heads(y, num_heads) for y in (q, k, v)), allowed)
    return linear(sub(p, "out_proj"), out) if sub(p, "out_proj") else out


def sum_kron(p: Params, x: Tensor) -> Tensor:
    return sum(z.T @ x @ w for z, w in zip(p["z"], p["w"], strict=True))


def hierarchical_seed_pooling(
    p: Params, history: Tensor, lengths: Tensor, num_heads: int, norm=layer_norm, residual: bool = False
) -> Tensor:
    seeds = norm(sub(p, "norm"), p["seeds"])
    read = target_attention(sub(p, "attention"), seeds, history, lengths, num_heads)
    return sum_kron(sub(p, "kron"), read + seeds if residual else read)


def seed_pooling(p: Params, history: Tensor, lengths: Tensor, num_heads: int) -> Tensor:
    def row_wise(name: str, x: Tensor) -> Tensor:
        return linear(sub(p, f"{name}.2"), linear(sub(p, f"{name}.0"), x).clamp_min(0))

    read = target_attention(
        sub(p, "attention"), p["attention.queries"], row_wise("history_ff", history), lengths, num_heads
    )
    h = layer_norm(sub(p, "norm"), p["attention.queries"] + read)
    return layer_norm(sub(p, "out_norm"), h + row_wise("ff", h))


def angles(lengths: Tensor, longest: int, timestamps: Tensor | None, head_dim: int, gap: str, combine: str) -> Tensor:
    """``[B, L, D/2]`` in float64, one sequence and row at a time; timestamps ``[B, L]``."""
    out = torch.zeros(len(lengths), longest, head_dim // 2, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        for t in range(length):
            if timestamps is None:
                tau = 0.0
            elif gap == "previous":
                tau = math.log(1 + float(timestamps[b, t] - timestamps[b, max(t - 1, 0)]) / 86_400)
            else:
                tau = math.log(1 + float(timestamps[b, length - 1] - timestamps[b, t]) / 86_400)
            for j in range(head_dim // 2):
                if timestamps is None or combine == "sum":
                    out[b, t, j] = (t + tau) * 10_000 ** (-2 * j / head_dim)
                elif j < head_dim // 4:
                    out[b, t, j] = t * 10_000 ** (-2 * j / head_dim)
                else:
                    out[b, t, j] = tau * 10_000 ** (-2 * (j - head_dim // 4) / head_dim)
    return out


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair of columns ``(j, j + D/2)`` of ``[B, H, L, D]`` as a complex number times ``e^{iθ}``."""
    half = x.shape[-1] // 2
    number = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
    turned = number * torch.polar(torch.ones_like(angle), angle)[:, None].to(number.dtype)
    return torch.cat([turned.real, turned.imag], dim=-1)


def window(lengths: Tensor, longest: int, reach: int) -> Tensor:
    """``[B, 1, L, L]``: keys at most ``reach`` away."""
    t = torch.arange(longest)
    near = (t[:, None] - t[None, :]).abs() <= reach
    return (near & exists(lengths, longest)[:, None, :])[:, None]


def block(lengths: Tensor, longest: int, size: int) -> Tensor:
    """``[B, 1, L, L]``: keys of the same block."""
    t = torch.arange(longest) // size
    return ((t[:, None] == t[None, :]) & exists(lengths, longest)[:, None, :])[:, None]


def self_attention(
    p: Params, x: Tensor, allowed: Tensor, num_heads: int, angle: Tensor | None, rotate_values: bool = False
) -> Tensor:
    q, k, v = (heads(y, num_heads) for y in linear(sub(p, "in_proj"), x).chunk(3, dim=-1))
    if angle is not None:
        q, k = turn(q, angle), turn(k, angle)
        v = turn(v, angle) if rotate_values else v
    return linear(sub(p, "out_proj"), softmax_attention(q, k, v, allowed.expand(-1, num_heads, -1, -1)))


def weight_generation(p: Params, x: Tensor) -> Tensor:
    m = two_layers(sub(p, "mlp"), torch.einsum("mn,bne->bme", p["compress.weight"], x))
    return m / (1 + (-two_layers(sub(p, "gate"), m)).exp())


def wukong_layer(p: Params, x: Tensor) -> Tensor:
    pairs = torch.einsum("bne,bme->bnm", x, x)
    flat = torch.einsum("bnm,mk->bnk", pairs, p["y"]).flatten(1)
    fmb = two_layers(sub(p, "mlp"), layer_norm(sub(p, "norm"), flat)).unflatten(1, (-1, x.shape[-1]))
    lcb = torch.einsum("mn,bne->bme", p["lcb.weight"], x)
    residual = torch.einsum("mn,bne->bme", p["residual.weight"], x) if "residual.weight" in p else x
    return layer_norm(sub(p, "out_norm"), torch.cat([fmb, lcb], dim=1) + residual)


def wukong_experts(p: Params, x: Tensor, parts: list[list[int]]) -> Tensor:
    return torch.cat([wukong_layer(sub(p, f"experts.{i}"), x[:, part]) for i, part in enumerate(parts)], dim=1)


def strided(num_tokens: int, num_experts: int) -> list[list[int]]:
    return [[i for i in range(num_tokens) if i % num_experts == g] for g in range(num_experts)]


def ranking_head(p: Params, x: Tensor) -> Tensor:
    return two_layers(sub(p, "mlp"), x.flatten(1))


def kunlun(p: Params, towers, num_experts: int, pattern: str, closing: bool, tokens, events, lengths, timestamps):
    """The whole stack; ``pattern`` has a letter a layer: g(lobal), l(ocal), f(ull)."""
    x, s, h = tokens, dict(events), {}
    angle = {
        name: angles(lengths[name], s[name].shape[1], timestamps.get(name), tower.embed_dim // tower.num_heads,
                     "previous", "sum") if tower.rotary else None
        for name, tower in towers.items()
    }  # fmt: skip
    for layer, kind in enumerate(pattern + ("c" if closing else "")):
        q = sub(p, "closing" if kind == "c" else f"layers.{layer}")
        block_p = sub(q, "interaction")
        x_sum = weight_generation(sub(block_p, "weight_generation"), x)
        running = {n: t for n, t in towers.items() if layer < t.num_layers or kind == "c"}
        for name, tower in running.items():
            if kind in "gfc":
                h[name] = hierarchical_seed_pooling(
                    sub(block_p, f"pools.{name}"), s[name], lengths[name], tower.num_heads
                )
        joined = [x_sum, *(linear(sub(block_p, f"projections.{name}"), h[name]) for name in towers)]
        joined = torch.cat(joined, dim=1)
        x = wukong_experts(sub(block_p, "interaction"), joined, strided(joined.shape[1], num_experts))
        for name, tower in running.items():
            t = sub(q, f"transformers.{name}")
            if kind in "gf" and sub(t, "feed_forward"):
                names = [tower.activation] * tower.num_heads if isinstance(tower.activation, str) else tower.activation
                s[name] = feed_forward(
                    sub(t, "feed_forward"), s[name], x_sum, tower.num_heads, list(names), tower.ffn_scale
                )
            if kind in "lf" and sub(t, "attention"):
                allowed = window(lengths[name], s[name].shape[1], tower.window)
                update = self_attention(sub(t, "attention"), s[name], allowed, tower.num_heads, angle[name])
                s[name] = layer_norm(sub(t, "norm"), s[name] + update)
    return x
