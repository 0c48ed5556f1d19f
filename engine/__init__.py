"""Inference Lab's engine: a compact, readable LLM serving engine whose every step can be seen.

``from engine import LLM, SamplingParams`` is the whole offline interface. Importing this
package is cheap: torch is loaded only when ``LLM`` is first touched, so that pages and tools which
only need the configuration or the trace records never pay for it.
"""

from typing import TYPE_CHECKING, Any

from engine.core.config import EngineConfig
from engine.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.core.outputs import RequestOutput
    from engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    if name == "RequestOutput":
        from engine.core.outputs import RequestOutput

        return RequestOutput
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
