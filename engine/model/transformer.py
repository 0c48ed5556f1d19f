"""The transformer: a packed batch of tokens in, one hidden state a token out.

A step mixes prefills and decodes freely. Their tokens lie one after another in one flat batch of T tokens, without padding::

    token_ids    [ a0 a1 a2 a3 | b7 | c2 c3 ]      T = 7: a prefill of 4, a decode, a chunk of a prefill
    positions    [  0  1  2  3 |  7 |  2  3 ]

Everything but attention treats tokens one by one and so never sees where a sequence begins. Attention
(``engine.model.attention``) knows the sequences and where their K and V are stored.

One layer, as in Llama and its relatives::

    x ─┬─ norm ── q, k, v ── (bias, q/k norm) ── rotate q, k ── store k, v; attend ── out ─(+)─▶ x
       └──────────────────────────────────────────────────────────────────────────────────┘
    x ─┬─ norm ── gate, up ── silu(gate) · up ── down ─(+)─▶ x
       └────────────────────────────────────────────────┘

Shapes below: T tokens, H query heads, Hkv key and value heads, D elements a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.model.fused import add_rms_norm, norm_heads, rms_norm, silu_mul
from engine.model.rope import rope_tables, rotate
from engine.model.spec import ModelSpec
from engine.model.weights import LayerWeights, ModelWeights

if TYPE_CHECKING:
    from engine.model.attention import Attention, Plan

SMALL_BATCH = (4, 16)
"""Rows for which oneDNN multiplies faster than MKL in float32."""
ONE_DNN: Callable[..., torch.Tensor] | None = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
)


class Transformer:
    """A decoder-only transformer with its weights. It holds no state between calls; several runners can share it."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self.spec = spec
        self.weights = weights
        self._cos, self._sin = self._tables(min(spec.context_limit, 2048))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and KV."""
        return self.weights.embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head is counted once."""
        return self.weights.num_parameters * self.weights.embedding.element_size()

    @property
    def kv_bytes_per_token(self) -> int:
        """2 · layers · KV heads · head dimension · bytes an element."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.weights.embedding.element_size()

    @property
    def rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [positions, head dimension]. They are never changed, only replaced by longer ones."""
        return self._cos, self._sin

    def prepare_positions(self, length: int) -> None:
        """Make the rotary tables reach ``length`` positions. Who reads the old ones by address must hold on to them."""
        if length > self._cos.shape[0]:
            self._cos, self._sin = self._tables(length)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, plan: Plan, fused: bool = False
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the last layer, before the final norm; K and V are stored on the way.

        Args:
            token_ids: [T] int64.
            positions: [T] int64, each token's place in its own sequence.
            attention: the backend, with the KV pool.
            plan: what ``attention.plan`` made of this step's sequences.
            fused: elementwise work in Triton kernels (``engine.model.fused``).
        """
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        x, eps = F.embedding(token_ids, self.weights.embedding), self.spec.norm_eps
        added: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            # Each branch is added where the next one's norm reads the sum anyway: one kernel for both.
            if added is None:
                normed = rms_norm(x, layer.input_norm, eps, fused)
            else:
                normed = add_rms_norm(x, added, layer.input_norm, eps, fused)
            attended = self._attend(index, layer, normed, cos, sin, attention, plan, fused)
            normed = add_rms_norm(x, attended, layer.post_norm, eps, fused)
            gate_up = project(normed, layer.gate_up, layer.gate_up_bias)
            added = F.linear(silu_mul(gate_up, fused), layer.down, layer.down_bias)
        return x if added is None else x.add_(added)

    @torch.inference_mode()
    def normalise(self, hidden: torch.Tensor, fused: bool = False) -> torch.Tensor:
        """The final norm, for the rows one needs."""
        return rms_norm(hidden, self.weights.final_norm, self.spec.norm_eps, fused)

    @torch.inference_mode()
    def logits(self, normalised: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32."""
        return self.raw_logits(normalised).float()

    @torch.inference_mode()
    def raw_logits(self, normalised: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] in the model's number format."""
        return project(normalised, self.weights.head)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
        plan: Plan,
        fused: bool,
    ) -> torch.Tensor:
        spec = self.spec
        heads, rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, spec.qkv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            norm_heads(qkv, layer.q_norm, layer.k_norm, heads, spec.norm_eps, fused)
        if attention.rotates:
            attended = attention.attend_rotating(index, qkv, cos, sin, plan)
        else:
            rotate(qkv[:, :rotated], cos, sin)
            attended = attention.attend(index, qkv[:, :heads], qkv[:, heads:].unflatten(1, (2, spec.num_kv_heads)), plan)
        return F.linear(attended, layer.out, layer.out_bias)

    def _tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope_tables(self.spec.rope, self.spec.head_dim, length, self.dtype)
        return cos.to(self.device), sin.to(self.device)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` for tall matrices: x [rows, in] · weight [out, in]ᵀ + bias.

    In float32 on a CPU a handful of rows goes to oneDNN instead of MKL. One core, SmolLM2's shapes, 8 rows: head 14.9 ms
    instead of 29.9, gate-up of all layers 30.6 instead of 41.8; outside of 4 to 16 rows MKL is as quick or quicker.
    """
    few = x.dtype == torch.float32 and x.device.type == "cpu" and SMALL_BATCH[0] <= x.shape[0] <= SMALL_BATCH[1]
    if few and ONE_DNN is not None:
        return ONE_DNN(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
