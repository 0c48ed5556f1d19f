"""When an output ends: length, end-of-sequence, stop tokens, and stop strings that never leak into a stream.

A stop string may arrive in pieces. Text that could be its beginning is held back until the next tokens decide::

    stop = "DEFGHIJ"     tokens  "ABC"   "DEF"      "G"          "HI"           "J"
                         text    ABC     ABCDEF     ABCDEFG      ABCDEFGHI      ABC|DEFGHIJ  ← found, cut here
                         shown   ABC     ABC        ABC          ABC            ABC
"""

from __future__ import annotations

from engine.core.request import Request
from engine.core.trace import FinishReason


def check_tokens(request: Request, token: int, max_model_len: int) -> FinishReason | None:
    """Whether the token just appended ends the output. An ending token counts as an output token; its text is not shown."""
    params = request.params
    count = len(request.token_ids) - request.num_prompt_tokens
    if count > params.min_tokens or not params.min_tokens:
        if token in params.stop_token_ids:
            request.trace.stop_reason = token
            return "stop"
        if token in request.eos_token_ids and not params.ignore_eos:
            return "stop"
    if count >= request.max_tokens or len(request.token_ids) >= max_model_len:
        return "length"
    return None


def take_text(request: Request, token: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
    """Decode one more token; return the text that can be shown now and the finish reason.

    The whole text so far is in ``request.text``; ``request.reported_text`` counts the characters shown.
    """
    decoder = request.decoder
    if decoder is None:
        return "", reason
    before = len(request.text)
    if reason != "stop" or request.params.include_stop_str_in_output:
        request.text += decoder.append(token)
    if reason:
        request.text += decoder.finish()
    stops = request.params.stop_strings
    if stops and len(request.token_ids) - request.num_prompt_tokens > request.params.min_tokens:
        found = find_stop(request.text, before, stops)
        if found is not None:
            start, stop = found
            end = start + len(stop) if request.params.include_stop_str_in_output else start
            request.text = request.text[:end]
            request.trace.stop_reason = stop
            reason = "stop"
    shown_to = len(request.text) if reason else len(request.text) - held_back(request.text, stops)
    delta = request.text[request.reported_text : shown_to]
    request.reported_text = max(request.reported_text, shown_to)
    return delta, reason


def find_stop(text: str, new_from: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The earliest stop string that ends after character ``new_from``: (where it starts, which one)."""
    best: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, new_from - len(stop) + 1))
        if start >= 0 and (best is None or start < best[0]):
            best = (start, stop)
    return best


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stops), default=0) - 1), 0, -1):
        tail = text[-length:]
        if any(len(stop) > length and stop.startswith(tail) for stop in stops):
            return length
    return 0
