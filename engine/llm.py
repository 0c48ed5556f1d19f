"""The offline interface: a model and an engine in this process, for notebooks, tests and the terminal.

from engine import LLM, SamplingParams

llm = LLM("tiny", block_size=8)
for output in llm.generate(["One", "Two"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.prompt, "→", output.outputs[0].text)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from engine.core.block_pool import BlockHash
from engine.core.clock import Clock, MonotonicClock
from engine.core.config import EngineConfig, build_config, require_gpu
from engine.core.engine import Engine
from engine.core.outputs import ClosedRequest, EngineStats, Listener, OpenedRequest, RequestOutput, TokenEvent
from engine.core.runner import Runner
from engine.core.sampling_params import SamplingParams
from engine.core.trace import RequestTrace, StepTrace
from engine.model.checkpoint import Progress
from engine.model.loader import LoadedModel, load_model
from engine.model.memory import CudaProbe, fit_pool
from engine.model.runner import ModelRunner
from engine.serve.detokenizer import Codec

Prompt = str | list[int]
Message = Mapping[str, Any]
DEFAULT_MAX_MODEL_LEN = 2048
"""Tokens; the default where neither the caller nor the model asks for less."""


def resolve_config(loaded: LoadedModel, fields: Mapping[str, Any]) -> EngineConfig:
    """An engine configuration for a model: ``max_model_len`` left out or None becomes min(the model's limit, 2048).

    Raises:
        ConfigError: (a ``ValueError``) a setting is unknown or impossible.
        ValueError: ``max_model_len`` exceeds the model's positions.
    """
    fields, limit = dict(fields), loaded.context_limit
    if fields.get("max_model_len") is None:
        fields["max_model_len"] = min(limit, DEFAULT_MAX_MODEL_LEN)
    config = build_config(fields)
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {limit} positions of {loaded.info.title}: "
            f"set max_model_len to at most {limit}, or choose a model with a longer context"
        )
    return config


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    runner: Runner | None = None,
    clock: Clock | None = None,
    listener: Listener | None = None,
    block_hash: BlockHash | None = None,
    attention_backend: str | None = None,
    enforce_eager: bool = False,
) -> Engine:
    """An engine that runs ``loaded``, with its tokenizer's decoder and its end-of-sequence tokens.

    Raises:
        ValueError: the KV pool doesn't fit into memory, or ``max_model_len`` exceeds the model's positions.

    ``gpu_memory_utilization`` sizes the pool here: the engine's own ``config`` says how many blocks it became.
    """
    codec = Codec(loaded.tokenizer)
    if runner is None:
        make = partial(
            ModelRunner,
            loaded.transformer,
            codec=codec,
            attention_backend=attention_backend or loaded.attention_backend,
            enforce_eager=enforce_eager,
        )
        config = fit_pool(loaded.transformer, config, CudaProbe(loaded.transformer, make))
        runner = make(config)
    else:
        require_gpu(config, "a runner of your own")
    return Engine(
        config,
        runner,
        clock,
        codec=codec,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.transformer.spec.vocab_size,
        listener=listener,
        block_hash=block_hash,
    )


class LLM:
    """A language model with its engine.

    Args:
        model: "smollm2", "tiny", a path, a name on the hub, or a ``LoadedModel`` to share its weights with others.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
        attention_backend: "auto", "sdpa" or "triton"; None: what the model was loaded with, "auto" at first.
        enforce_eager: no CUDA graphs.
        runner: computes the steps instead of the model: a script, a model of other hardware.
        clock: engine time; default the machine's monotonic clock.
        block_hash: digest of a block for the prefix cache.
        listener: hears of everything as it happens.
        progress: told what is being done while the model is loaded.
        **config: fields of ``EngineConfig``.

    Raises:
        ValueError: the model can't be loaded or a setting can't work; the message names the numbers and the way out.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel = "smollm2",
        *,
        device: str = "auto",
        dtype: str = "auto",
        attention_backend: str | None = None,
        enforce_eager: bool = False,
        runner: Runner | None = None,
        clock: Clock | None = None,
        block_hash: BlockHash | None = None,
        listener: Listener | None = None,
        progress: Progress | None = None,
        **config: Any,
    ) -> None:
        if not isinstance(model, LoadedModel):
            model = load_model(model, device, dtype, progress, attention_backend or "auto")
        self.model = model
        self.tokenizer = self.model.tokenizer
        self.clock = clock or MonotonicClock()
        self._closings = _Closings(listener)
        self.engine = build_engine(
            self.model,
            resolve_config(self.model, config),
            runner=runner,
            clock=self.clock,
            listener=self._closings,
            block_hash=block_hash,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
        )
        self.config = self.engine.config

    # ------------------------------------------------------------------ all at once

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns when all are done, in their order.

        Args:
            prompts: a text, a list of token ids, or a list of texts or of token-id lists.
            sampling_params: one for all, or one for each prompt; default ``SamplingParams()``.

        Raises:
            ValueError: a prompt was refused; nothing of the batch stays in the engine.
        """
        return self._run([(self._tokenise(prompt), prompt) for prompt in _listed(prompts)], sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; like ``generate`` with the model's chat template applied.

        Args:
            messages: ``[{"role": "user", "content": "Hi"}]``, or a list of such lists.
            sampling_params: one for all, or one for each conversation.

        Raises:
            ValueError: the model has no chat template, there are no messages, or a prompt was refused.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        return self._run([self._tokenise_chat(conversation) for conversation in conversations], sampling_params)

    # ------------------------------------------------------------------ step by step

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue one prompt (text or token ids); returns the request's id. It runs as ``step`` is called.

        Raises:
            ValueError: it can never run, or the queue is full; the message names the numbers.
        """
        arrival = self.clock.now()
        ids = self._tokenise(prompt)
        return self._add(ids, prompt, params or SamplingParams(), arrival, priority, cache_salt)

    def step(self) -> StepTrace:
        """Run one engine step and return its trace."""
        return self.engine.step()

    def abort(self, request_id: str) -> bool:
        """Stop a request; False if it is unknown or already done."""
        return self.engine.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether anything is running or waiting."""
        return self.engine.has_unfinished()

    def stats(self) -> EngineStats:
        """Counters and gauges: blocks, requests, tokens."""
        return self.engine.stats()

    def request(self, request_id: str) -> RequestTrace:
        """The life of one request so far."""
        return self.engine.request(request_id)

    def output(self, request_id: str) -> RequestOutput:
        """Texts and tokens of one request so far."""
        return self.engine.output(request_id)

    def check(self) -> None:
        """Verify every invariant of pool, block tables and queues; raises with what is wrong."""
        self.engine.check()

    # ------------------------------------------------------------------ inside

    def _tokenise(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty (0 characters): send at least one character")
            return self.tokenizer.encode(prompt)
        ids = list(prompt)
        if not ids:
            raise ValueError("the prompt is empty (0 tokens): send at least one token")
        return ids

    def _tokenise_chat(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        if not messages:
            raise ValueError("the conversation is empty (0 messages): send at least one message")
        text = self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.encode(text, add_special_tokens=False), text

    def _add(
        self,
        ids: list[int],
        prompt: Prompt,
        params: SamplingParams,
        arrival: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        return self.engine.add_request(
            ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            arrival=arrival,
            tokenised=self.clock.now(),
            prompt=prompt if isinstance(prompt, str) else None,
        )

    def _run(
        self,
        prompts: Sequence[tuple[list[int], Prompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        finished: dict[str, RequestOutput] = {}
        ids: list[str] = []
        arrival = self.clock.now()
        try:
            for (tokens, prompt), chosen in zip(prompts, params, strict=True):
                while self.engine.stats().waiting + chosen.n > self.config.max_num_queued_requests and len(finished) < len(
                    ids
                ):
                    self._advance(ids, finished)
                ids.append(self._add(tokens, prompt, chosen, arrival))
            while len(finished) < len(ids):
                self._advance(ids, finished)
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        finally:
            if self.config.async_scheduling:
                self.engine.flush_events()  # a step that was scheduled ahead for nobody
            self._closings.ids.clear()
        return [finished[request_id] for request_id in ids]

    def _advance(self, ids: Sequence[str], finished: dict[str, RequestOutput]) -> None:
        """One step; outputs of requests that ended with it are kept (the engine forgets old ones)."""
        self.engine.step()
        closed, self._closings.ids = self._closings.ids, []
        wanted = set(ids).difference(finished) if closed else set()
        for request_id in closed:
            if request_id in wanted and (output := self.engine.output(request_id)).finished:
                finished[request_id] = output


class _Closings:
    """A listener that notes which requests ended, and passes everything on."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self.ids: list[str] = []

    def opened(self, event: OpenedRequest) -> None:
        if self._listener:
            self._listener.opened(event)

    def token(self, event: TokenEvent) -> None:
        if self._listener:
            self._listener.token(event)

    def closed(self, event: ClosedRequest) -> None:
        self.ids.append(event.trace.parent_id or event.trace.request_id)
        if self._listener:
            self._listener.closed(event)

    def stepped(self, step: StepTrace) -> None:
        if self._listener:
            self._listener.stepped(step)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("list[int]", list(prompts))]
    return list(cast("Sequence[Prompt]", prompts))


def _one_each(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling_params for {count} prompts: give one, or one for each prompt")
    return list(sampling_params)
