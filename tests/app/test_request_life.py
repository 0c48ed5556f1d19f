"""One request's life: bars add up, brackets carry the metrics' values, labels stay inside the frame."""

import plotly.graph_objects as go
import pytest

from app.figures.palette import DARK, LIGHT
from app.figures.request_life import request_life_figure
from engine.core.trace import RequestTrace


def trace(*tokens: float, finished: bool = True) -> RequestTrace:
    return RequestTrace(
        request_id="a", arrival=1.0, tokenised=1.01, queued=1.01, first_scheduled=1.03,
        token_times=list(tokens), token_steps=list(range(len(tokens))), prompt_tokens=8,
        finished=tokens[-1] if finished and tokens else -1.0, finish_reason="stop" if finished and tokens else None,
    )  # fmt: skip


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("tokens", [(), (1.05,), (1.05, 1.06), (1.05, 1.1, 5.0), (4.9, 4.95, 5.0)], ids=len)
def test_every_stage_of_a_life_is_a_valid_figure(theme, tokens) -> None:
    one = trace(*tokens)
    figure = request_life_figure(one, theme)
    go.Figure(figure)
    bars = [bar for bar in figure["data"] if bar["type"] == "bar"]
    assert sum(bar["x"][0] for bar in bars) == pytest.approx(((tokens[-1] if tokens else 1.03) - 1.0) * 1000)
    notes = {note["text"].split(" · ")[0]: note for note in figure["layout"]["annotations"]}
    if tokens:
        assert notes["TTFT"]["text"] == f"TTFT · {(tokens[0] - 1) * 1000:,.1f} ms"
        assert notes["E2E latency"]["text"] == f"E2E latency · {(tokens[-1] - 1) * 1000:,.1f} ms"
    low, high = figure["layout"]["xaxis"]["range"]
    for note in notes.values():
        edge = {"left": note["x"] - low, "right": high - note["x"], "center": min(note["x"] - low, high - note["x"])}
        assert edge[note["xanchor"]] >= 0 and (note["xanchor"] != "center" or edge["center"] > 0.25 * (high - low))


@pytest.mark.parametrize("tokens", [(1.05, 1.06), (1.05, 1.1, 5.0)], ids=len)
def test_the_gaps_and_their_mean_are_named_apart(tokens) -> None:
    """A bracket that covers all gaps must not read as if its length were TPOT."""
    notes = [note["text"] for note in request_life_figure(trace(*tokens), LIGHT)["layout"]["annotations"]]
    together, mean = next(text for text in notes if "TPOT" in text).split("<br>")
    span = 1000 * (tokens[-1] - tokens[0])
    assert together.endswith(f"· {span:,.1f} ms") and "TPOT" not in together
    assert mean == f"TPOT, their mean · {span / (len(tokens) - 1):,.1f} ms"
