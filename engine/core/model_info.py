"""What a loaded model is, as plain data: made where it is loaded, sent to the pages, written into run files."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What produced the numbers: shown on every screen and written into every run file."""

    name: str
    """As asked for: 'smollm2', 'tiny', a path or a hub name."""
    title: str
    """For people: 'SmolLM2-135M-Instruct'."""
    weights: str
    """For people: 'Q4_1 weights, dequantised', 'random weights (its text is noise)', 'safetensors'."""
    architecture: str
    device: str
    """'cpu', 'cuda:0 NVIDIA H200' …"""
    dtype: str
    threads: int
    omp_wait: str
    """How OpenMP's threads wait, in words ('spin 10,000', 'passive', 'libgomp's default')."""
    attention: str
    """Attention backend in use."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    """Context length the checkpoint was made for, tokens."""
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    """2 · layers · KV heads · head dimension · bytes an element."""
    has_chat_template: bool
    versions: dict[str, str]
    """'torch' → '2.13.0+cpu' and so on."""
