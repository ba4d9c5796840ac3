# SPDX-License-Identifier: Apache-2.0
"""What SGLang's layers with gated delta rules call on a CPU, in plain torch: slow, and the same on every machine.

States are `[slots, ...]` tensors of any strides; a call reads and writes the rows that its indices name, and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

Both = tuple[torch.Tensor, torch.Tensor]


def segments(starts: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[int, slice, int]]:
    """(number, tokens, slot) of each sequence of a batch."""
    edges = starts.tolist()
    for number, slot in enumerate(slots.tolist()):
        yield number, slice(edges[number], edges[number + 1]), slot


def convolve(x: torch.Tensor, past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Both:
    """Causal, channel by channel. x `[channels, tokens]`, past `[channels, width - 1]`: returns the outputs and the new past."""
    joined = torch.cat((past.to(x.dtype), x), dim=1)
    windows = joined.unfold(1, weight.shape[1], 1)  # [channels, tokens, width]
    out = (windows * weight[:, None, :]).sum(-1)
    if bias is not None:
        out = out + bias[:, None]
    return (functional.silu(out) if activation in ("silu", "swish") else out), joined[:, joined.shape[1] - past.shape[1] :]


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """Prefills: x `[channels, tokens of all sequences]`."""
    out = torch.empty_like(x)
    for number, tokens, slot in segments(query_start_loc, cache_indices):
        state = conv_states[slot]
        past = state if bool(has_initial_state[number]) else torch.zeros_like(state)
        out[:, tokens], new = convolve(x[:, tokens], past, weight, bias, activation)
        state.copy_(new)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """Decodes: x `[sequences, channels]`, a token of each."""
    out = torch.empty_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        column, new = convolve(x[number][:, None], conv_states[slot], weight, bias, activation)
        out[number] = column[:, 0]
        conv_states[slot].copy_(new)
    return out


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One sequence: q and k `[tokens, key heads, K]`, v `[tokens, heads, V]`, g and beta `[tokens, heads]`; state `[heads, V, K]` is
    moved on in place."""
    times = v.shape[1] // q.shape[1]
    q, k = (functional.normalize(part.float(), dim=-1, eps=1e-6).repeat_interleave(times, 1) for part in (q, k))
    out = torch.empty_like(v)
    now = state.float()
    for token in range(v.shape[0]):
        now = now * g[token].float().exp()[:, None, None]
        error = v[token].float() - torch.einsum("hvk,hk->hv", now, k[token])
        now = now + torch.einsum("hv,hk->hvk", error * beta[token].float()[:, None], k[token])
        out[token] = torch.einsum("hvk,hk->hv", now, q[token] * q.shape[-1] ** -0.5).to(v.dtype)
    state.copy_(now)
    return out


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None, None]:
    """Prefills: all tensors have a first dimension of 1, then the tokens of all sequences."""
    out = torch.empty_like(v)
    for _number, tokens, slot in segments(cu_seqlens, initial_state_indices):
        parts = (part[0, tokens] for part in (q, k, v, g, beta))
        out[0, tokens] = delta_rule(*parts, initial_state[slot])
    return out, None, None


def fused_gdn_gating_cpu(A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> Both:
    """How much of the state stays (the logarithm), and how much of the error is learnt: `[1, tokens, heads]`."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Decodes: a token of each sequence."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
    )
    return out


def fused_rmsnorm_gated_cpu(x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps) * functional.silu(g)


OPERATORS = torch.library.Library("sgl_kernel", "DEF")
OPERATORS.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
OPERATORS.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
    "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, "
    "float softplus_beta, float softplus_threshold) -> Tensor"
)
OPERATORS.define("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor g, float eps) -> Tensor")
for operator in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu, fused_rmsnorm_gated_cpu):
    OPERATORS.impl(operator.__name__, operator, "CPU")
