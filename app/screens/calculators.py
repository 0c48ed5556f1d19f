"""How much memory the KV cache takes: the formula for any model, beside what this lab's engine really holds."""

from __future__ import annotations

import contextlib
from typing import Literal

import psutil
import streamlit as st

from app.experiments.kv_memory import KNOWN, KVShape, answer, of_config, of_model, of_text, pool_estimate, size
from app.experiments.page import until_ready
from app.figures.calculator_memory import memory_alt, memory_figure
from app.figures.palette import theme as theme_named
from app.reading import current_lab
from app.session import hub
from engine.observe.formulas import DATASHEETS, DTYPE_BYTES, FormulaError

LINK: Literal["query-params"] = "query-params"
LOADED, PASTED = "The loaded model", "A pasted config.json"

lab = current_lab()
theme = theme_named("dark" if st.context.theme.type == "dark" else "light")
model = lab.client.state.model
loaded = of_model(model) if model else None

st.title("KV memory")
st.markdown(
    "Every token of every running request keeps its keys and values: **2 × layers × KV heads × head dimension × tokens × "
    "requests × bytes an element**. Numbers in *italics* are estimates by this formula; numbers in plain type are what the "
    "engine of this lab holds."
)


def chosen_shape() -> KVShape | None:
    """The model that the form names."""
    # The same choices before and after the model is loaded: what is chosen by default stands in no address.
    source = st.selectbox("Model", [LOADED, *KNOWN, PASTED], key="c_model", bind=LINK)
    if source == LOADED:
        if loaded is None:
            st.caption(
                "Its shape is not known. Choose another one."
                if model
                else "It is not loaded yet. Choose another one, or wait."
            )
        return loaded
    if source in KNOWN:
        return of_config(KNOWN[source])
    text = st.text_area("config.json", height=180, key="c_config", placeholder='{"num_hidden_layers": 32, …}')
    if not text.strip():
        st.caption("Paste the config.json of a Llama, Mistral, Qwen2 or Qwen3 style checkpoint.")
        return None
    try:
        return of_text(text)
    except FormulaError as error:
        st.error(str(error))
        return None


left, right = st.columns([1, 2], gap="large")
with left:
    shape = chosen_shape()
    dtypes = list(DTYPE_BYTES)
    kv_dtype = st.selectbox("KV dtype", dtypes, dtypes.index("bfloat16"), key="c_kv_dtype", bind=LINK)
    weight_dtype = st.selectbox("Weight dtype", dtypes, dtypes.index("bfloat16"), key="c_weight_dtype", bind=LINK)
    block_size = int(st.number_input("block_size, tokens", 1, 1024, 16, key="c_block", bind=LINK))
    context = int(st.number_input("Context of one request, tokens", 1, 1_000_000, 4096, key="c_context", bind=LINK))
    devices = {"this machine": float(psutil.virtual_memory().total)} | {sheet.name: sheet.memory for sheet in DATASHEETS}
    device = st.selectbox("Memory of (GPUs by datasheet)", [*devices, "another size"], key="c_device", bind=LINK)
    if device == "another size":
        memory = float(st.number_input("Memory, GiB", 0.01, 10_000.0, 16.0, key="c_memory", bind=LINK)) * 2**30
    else:
        memory = devices[device]
    share = int(st.number_input("Usable for weights and KV, %", 1, 100, 90, key="c_share", bind=LINK)) / 100

if shape is not None:
    found = answer(
        shape,
        kv_dtype=kv_dtype,
        weight_dtype=weight_dtype,
        block_size=block_size,
        context=context,
        memory=memory,
        share=share,
    )
    waste = found.wasted_slots / (found.blocks * block_size)
    with right:
        tiles = {
            "One token": size(found.per_token),
            f"One request of {context:,}": size(found.held),
            "Such requests that fit": f"{found.fit:,}",
        }
        for column, (label, value) in zip(st.columns(3), tiles.items(), strict=True):
            with column.container(border=True):
                st.caption(f"{label} (estimate)")
                st.markdown(f"### *{value}*", text_alignment="left")
        st.markdown(
            f"*{shape.kind}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads for {shape.num_heads} query heads, "
            f"head dimension {shape.head_dim}. Weights {size(found.weights)}; {size(max(0.0, found.memory_for_kv))} are "
            f"left for KV of {size(memory * share)} usable. Paging: {found.blocks:,} blocks of {block_size}, "
            f"{found.wasted_slots} slots empty in the last one ({waste:.2%}), {size(found.held - found.stored)} more than "
            f"without paging.*"
        )
        if found.memory_for_kv <= 0:
            st.error(
                f"The weights alone take {size(found.weights)}, more than the {size(memory * share)} that may be used: "
                f"choose a larger device or a smaller weight dtype."
            )
        longest = max(256, shape.max_position)
        st.plotly_chart(
            memory_figure(found.per_token, block_size, longest, found.memory_for_kv, theme, (context, found.fit)),
            key="heat", theme=None, config={"displayModeBar": False},
            alt=memory_alt(found.per_token, block_size, longest, found.memory_for_kv),
        )  # fmt: skip
    st.header("What the number of KV heads and the dtype change", divider="gray")
    kinds = {
        "MHA: every query head its own": shape.num_heads,
        f"this model ({shape.kind})": shape.num_kv_heads,
        "MQA: one": 1,
    }
    st.caption("One token's keys and values, estimates.")
    st.table(
        [
            {
                "K and V": name,
                "heads": str(heads),
                **{dtype: f"*{size(shape.bytes_per_token(dtype, heads))}*" for dtype in dtypes},
            }
            for name, heads in kinds.items()
        ],
        border="horizontal",
        hide_index=True,
    )

st.header("The engine of this lab", divider="gray")
with contextlib.suppress(ValueError, RuntimeError):
    hub().ensure_open(lab)
info = lab.log.info
if model is None:
    until_ready(lab.client, "The lab's own pool appears here")
elif loaded is None:
    st.caption("The loaded model has no weights, so it has no pool to compare with.")
elif info is None:
    st.caption("The lab is being opened: reload the page.")
else:
    stats, config = lab.log.stats, info.config
    per_token = loaded.bytes_per_token(model.dtype) if model.dtype in DTYPE_BYTES else float(model.kv_bytes_per_token)
    estimate = pool_estimate(per_token, config.num_kv_blocks, config.block_size)
    element = per_token / (2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim)
    formula = f"2 × {loaded.num_layers} × {loaded.num_kv_heads} × {loaded.head_dim} × {element:g}"
    st.markdown(
        f"{model.title} · {model.dtype} · {config.num_kv_blocks:,} blocks of {config.block_size} tokens, and the null block."
        f"\n\n- Pool: {size(info.kv_pool_bytes)} allocated by the engine; *{size(estimate)} by the formula (estimate)*.\n"
        f"- One token: {size(model.kv_bytes_per_token)}; *{size(per_token)} by the formula (estimate): {formula}*.\n"
        f"- Now: **{stats.blocks_referenced:,}** blocks in use by requests, **{stats.blocks_cached:,}** kept for reuse, "
        f"**{stats.blocks_free:,}** free."
    )
