"""Tools of the page's tests: a real engine on a scripted runner whose trace fills a log, and a caller of ASGI routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig, build_config
from engine.core.engine import Engine
from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.runner import ScriptedRunner
from engine.core.sampling_params import SamplingParams
from engine.core.trace import StepTrace
from engine.observe.log import TraceLog
from engine.serve.protocol import LabInfo, LabUpdate


class Recorded:
    """An engine on a virtual clock (a step takes a second) whose news go into a log, as a host's would."""

    def __init__(self, **fields: Any) -> None:
        self.config: EngineConfig = build_config({"max_model_len": 256, "num_kv_blocks": 32, "max_num_seqs": 8, **fields})
        self.clock = VirtualClock()
        self.log = TraceLog()
        self._news: dict[str, list[Any]] = {"opened": [], "steps": [], "tokens": [], "closed": []}
        self.engine = Engine(self.config, ScriptedRunner(clock=self.clock), self.clock, listener=self)
        info = LabInfo(lab="test", config=self.config, mode="running", rate=None, generation=1, kv_pool_bytes=0)
        self.log.apply(LabUpdate(lab="test", generation=1, info=info))

    def opened(self, event: OpenedRequest) -> None:
        self._news["opened"].append(event)

    def token(self, event: TokenEvent) -> None:
        self._news["tokens"].append(event)

    def closed(self, event: ClosedRequest) -> None:
        self._news["closed"].append(event)

    def stepped(self, step: StepTrace) -> None:
        self._news["steps"].append(step)

    def add(self, prompt: list[int] | int, max_tokens: int = 8, **params: Any) -> str:
        """Add a request; a number stands for a prompt of that many tokens, different for each request."""
        start = 1000 * (self.engine.stats().running + self.engine.stats().waiting + 1)
        ids = list(range(start, start + prompt)) if isinstance(prompt, int) else prompt
        return self.engine.add_request(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))

    def steps(self, count: int) -> None:
        """Take steps, then tell the log."""
        for _ in range(count):
            self.engine.step()
        self.flush()

    def flush(self) -> None:
        news, self._news = self._news, {name: [] for name in self._news}
        self.log.apply(LabUpdate(lab="test", generation=1, stats=self.engine.stats(), now=self.clock.now(), **news))


def call(
    app: Callable[..., Any],
    method: str,
    path: str,
    body: Any = None,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    client: str = "127.0.0.1",
) -> SimpleNamespace:
    """One request to an ASGI app: ``status``, ``headers``, ``body`` and ``json``. ``client``: where it comes from."""
    sent = {"host": "lab.test"}
    if body is not None or raw is not None:
        sent["content-type"] = "application/json"
    sent.update(headers or {})
    payload = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    target, _, query = path.partition("?")
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": target, "raw_path": target.encode(),
        "root_path": "",
        "query_string": query.encode(), "scheme": "http", "server": ("lab.test", 80), "client": (client, 1),
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
    }  # fmt: skip
    found = SimpleNamespace(status=0, headers={}, body=b"", json=None)

    async def talk() -> None:
        chunks = [{"type": "http.request", "body": payload, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if chunks:
                return chunks.pop(0)
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found.status = message["status"]
                found.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                found.body += message.get("body", b"")

        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(talk())
    if found.headers.get("content-type", "").startswith("application/json"):
        found.json = json.loads(found.body)
    return found
