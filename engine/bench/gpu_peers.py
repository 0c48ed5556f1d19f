"""transformers on the same shapes, weights as random, on the same GPU in the same run: ``generate`` and ``generate_batch``.

Both get what they choose for themselves (attention, graphs, batch and cache sizes), except that nothing is downloaded:
FlashAttention is used where its package is installed, and torch's SDPA where it is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

import torch

from engine.bench.gpu_bench import Bench
from engine.bench.gpu_report import Reading
from engine.bench.gpu_shapes import Load, Shape, even_load


@dataclass
class PeerSpeed:
    """What ``generate_batch`` reached."""

    load: Load
    """What it was reached on."""
    tokens_per_second: float
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


@contextmanager
def peer_model(bench: Bench, shape: Shape) -> Iterator[Any]:
    """A model of that shape as transformers computes it, with random weights made on the device; gone afterwards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = dict(bench.shape(shape).config)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(made, dtype=bench.dtype, attn_implementation="sdpa")
    model.eval()
    try:
        yield model
    finally:
        del model
        bench.forget()


def generate(bench: Bench, shape: Shape) -> Reading:
    """Tokens a second of one sequence: how much longer many tokens take than one, so that the prompt does not count."""
    from transformers import GenerationConfig

    sizes, spec = bench.sizes, bench.shape(shape).spec
    load = even_load(1, sizes.decode_prompt, sizes.peer_tokens, spec.vocab_size)
    ids = torch.tensor(load.prompts, device=bench.device)
    with peer_model(bench, shape) as model:

        def seconds(tokens: int) -> float:
            config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
            start = time.perf_counter()
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            bench.synchronise()
            count = made.shape[1] - ids.shape[1]
            if count != tokens:
                raise RuntimeError(f"generate made {count} tokens where {tokens} were asked for")
            return time.perf_counter() - start

        seconds(2)

        def one() -> float:
            return (sizes.peer_tokens - 1) / (seconds(sizes.peer_tokens) - seconds(1))

        reading = Reading(bench.repeat(one))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        looked_up = 0 if spec.tied else spec.vocab_size * spec.hidden_size
        moved = (parameters - looked_up) * torch.empty(0, dtype=bench.dtype).element_size()
    reading.details = {"bytes_a_token": moved, "parameters": parameters}
    reading.notes = [f"{sizes.peer_tokens} tokens, greedy, as transformers does it by default."]
    return reading


def generate_batch(bench: Bench, shape: Shape, load: Load, until: float) -> PeerSpeed:
    """Output tokens a second of continuous batching on as much of ``load`` as fits the time, probed with a small share.

    Args:
        bench: device and sizes.
        shape: of the model.
        load: the whole load.
        until: when to be done, on ``time.perf_counter``'s clock.

    Raises:
        TimeoutError: not even the probe was done in time.
    """
    shares = [load.first(requests).cut(tokens) for requests, tokens in bench.sizes.peer_shares]
    with peer_model(bench, shape) as model:
        probe = shares[-1]
        _batch(bench, model, probe.cut(4), until)
        speed, attention = _batch(bench, model, probe, until)
        best = PeerSpeed(probe, speed)
        fits = [share for share in shares if share.total / speed < 0.8 * (until - time.perf_counter())]
        if fits and fits[0].total > probe.total:
            try:
                speed, attention = _batch(bench, model, fits[0], until)
                best = PeerSpeed(fits[0], speed)
            except TimeoutError as error:
                best.notes.append(f"A larger share was tried and given up: {error}.")
    best.notes.append(f"generate_batch used {attention}; {_batch_settings(bench)[1]}.")
    best.details = {"attention": attention}
    return best


def _batch(bench: Bench, model: Any, load: Load, until: float) -> tuple[float, str]:
    """Tokens a second, from handing the requests over to the last token, and the attention that was chosen.

    Raises:
        TimeoutError: it was not done at ``until``.
        RuntimeError: it stopped by itself, or gave another number of tokens than asked for.
    """
    from transformers import GenerationConfig

    sampling = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=max(load.output_tokens),
    )
    settings = _batch_settings(bench)[0]
    manager_of = model.continuous_batching_context_manager
    made = done = 0
    with manager_of(generation_config=sampling, continuous_batching_config=settings, block=True, timeout=10) as manager:
        attention = str(model.config._attn_implementation)
        start = time.perf_counter()
        for prompt, tokens in zip(load.prompts, load.output_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=tokens, eos_token_id=-1)
        while done < len(load.prompts):
            if time.perf_counter() > until:
                manager.stop(block=False, hard_stop=True)
                raise TimeoutError(f"{done} of {len(load.prompts)} requests were done when the time was over")
            result = manager.get_result(timeout=0.2)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"generate_batch failed a request: {result.error}")
                made, done = made + len(result.generated_tokens), done + 1
            elif result is None and not manager.is_running():
                raise RuntimeError(f"generate_batch stopped after {done} of {len(load.prompts)} requests")
        seconds = time.perf_counter() - start
    if made != load.total:
        raise RuntimeError(f"generate_batch made {made} tokens where {load.total} were asked for")
    return made / seconds, attention


def _batch_settings(bench: Bench) -> tuple[Any, str]:
    """Settings of continuous batching and what they are, in words: its own choice on a GPU, small buffers elsewhere."""
    from transformers import ContinuousBatchingConfig

    known = {item.name for item in fields(ContinuousBatchingConfig)}
    flash = any(find_spec(package) for package in ("flash_attn", "flash_attn_interface"))
    wanted: dict[str, Any] = {"auto_switch_to_flash": flash, "allow_block_sharing": False}
    if bench.device.type != "cuda":
        wanted |= {"num_blocks": 16, "page_size": 32, "max_batch_tokens": 64, "use_async_batching": False}
    text = "prefix sharing off, everything else as it chooses" if bench.device.type == "cuda" else "small buffers"
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known}), text
