// The panels beside the pictures. Texts of users and models only ever become text nodes.
import { arrange, brief, h, milliseconds, number, setText } from "./dom.js";

const MARKS = { waiting: "○", prefill: "◐", recompute: "◑", decode: "●", finished: "■" };

const QUANTILES = ["p50", "p90", "p95", "p99"];

const hue = (count) => "var(--hue-" + (count % 8) + ")";

export function renderHead(view, head) {
  if (!head) return;
  const model = head.model;
  const facts = model
    ? [
        ["lab-model", model.title, `${model.architecture}, ${number(model.num_parameters / 1e6)} million parameters`],
        ["lab-weights", model.weights, `Where the weights come from: ${model.weights}`],
        ["lab-device", model.device, "Device that computes"],
        ["lab-dtype", model.dtype, "Number format of weights and KV cache"],
        ...(head.gpu
          ? [["lab-gpu", `GPU ${head.gpu}`, "What the GPU says of itself (NVML), other programs included: share of the last second in which it worked, memory in use, power"]]
          : [
              ["lab-threads", `${model.threads} thread${model.threads === 1 ? "" : "s"}`, "CPU threads of the engine"],
              ["lab-omp", `OpenMP: ${model.omp_wait}`, "How the engine's threads wait for each other"],
            ]),
      ]
    : [];
  const words = {
    starting: "starting", loading: "loading", failed: "not loaded", stopped: "stopped",
    saved: "saved run",
    ready: head.mode === "paused" ? "paused" : head.rate ? `slow motion, ${head.rate} steps/s` : "running",
  };
  const text = words[head.state] || head.state;
  const whose = view.follows && !view.projector ? "You follow this lab. You look, the presenter drives." : "";
  const key = JSON.stringify([facts, text, head.run]);
  if (view.headKey === key) return;
  view.headKey = key;
  view.header.replaceChildren(
    h("strong", {}, "Inference Lab"),
    head.run ? h("span", { class: "lab-whose" }, h("b", {}, head.run), " ", h("a", { class: "lab-home", href: view.data.home ? "/?lab=" + encodeURIComponent(view.data.home) : "/" }, "Back to the live lab")) : "",
    whose ? h("span", { class: "lab-whose" }, whose, " ", h("a", { class: "lab-home", href: "/" }, "Open your own")) : "",
    h("span", { class: "lab-facts" }, facts.map(([name, value, title]) => h("span", { class: name, title }, value))),
    h("span", { class: "lab-state", "data-state": head.state === "ready" ? head.mode || "ready" : head.state, role: "status" }, text),
  );
}

export function renderRequests(view, requests) {
  const known = (view.rows ??= new Map());
  const seen = new Set();
  for (const request of requests) {
    seen.add(request.id);
    let row = known.get(request.id);
    if (!row) {
      row = newRow(view, request);
      known.set(request.id, row);
    }
    row.fill(request);
  }
  for (const id of known.keys()) if (!seen.has(id)) known.delete(id);
  const order = { decode: 0, prefill: 0, recompute: 0, waiting: 1, finished: 2 };
  const sorted = [...requests].sort((a, b) => order[a.state] - order[b.state] || (a.state === "finished" ? b.number - a.number : a.number - b.number));
  arrange(view.requests, sorted.map((request) => known.get(request.id).node));
}

function newRow(view, request) {
  const badge = h("span", { class: "lab-badge", style: { background: hue(request.number) } }, request.letter);
  const mark = h("span", { class: "lab-mark", "aria-hidden": "true" });
  const detail = h("span", { class: "lab-detail" });
  const prompt = h("span", { class: "lab-prompt", title: request.prompt }, request.prompt);
  const text = h("span", { class: "lab-out" });
  const stop = h("button", {
    type: "button", class: "lab-stop", title: `Stop ${request.letter}`, "aria-label": `Stop request ${request.letter}`,
    onclick: (event) => {
      event.stopPropagation();
      view.command("abort", { request_id: request.id });
    },
  }, "Stop");
  const choose = h("button", { type: "button", class: "lab-choose", "aria-label": `Select request ${request.letter}`, onclick: () => view.select(request.id) },
    badge, mark, detail);
  const node = h("li", { class: "lab-request", "data-id": request.id, onclick: (e) => { if (!e.target.closest("button")) view.select(request.id); } },
    h("div", { class: "lab-line" }, choose, stop), prompt, text);
  return {
    node,
    fill(now) {
      node.dataset.state = now.state;
      setText(mark, MARKS[now.state] || "");
      setText(detail, now.detail + (now.slow ? " · slow motion" : ""));
      setText(text, (now.cut ? "… " : "") + now.text);
      stop.hidden = !now.live;
      const chosen = view.look.selected === request.id;
      node.classList.toggle("lab-selected", chosen);
      choose.setAttribute("aria-pressed", String(chosen));
    },
  };
}

export function renderTables(view, tables) {
  const selected = view.look.selected;
  const rows = selected && tables.some((t) => t.id === selected) ? [...tables].sort((a, b) => (b.id === selected) - (a.id === selected)) : tables;
  setText(view.tablesTitle, tables.length ? "logical → physical" : "");
  if (!tables.length) {
    view.tableRows = null;
    view.tables.replaceChildren(h("p", { class: "lab-hint lab-always" }, view.sections.requests?.length ? "No request holds a block at this step." : "A request's block table appears here: which physical block holds its logical blocks 0, 1, 2 …"));
    return;
  }
  const known = view.tableRows ?? new Map();
  const size = Math.max(1, view.sections.head?.config?.block_size || 16);
  view.tableRows = new Map(rows.map((table) => [table.id, known.get(table.id) ?? newTable(table)]));
  for (const table of rows) view.tableRows.get(table.id).fill(table, table.id === selected, size);
  arrange(view.tables, rows.map((table) => view.tableRows.get(table.id).node));
}

/** One request's table. Only the cells that changed are touched: in a step that is one a request, of hundreds in all. */
function newTable({ id, number: place, letter }) {
  const badge = h("span", { class: "lab-badge", style: { background: hue(place) } }, letter);
  const more = h("span", { class: "lab-more" });
  const box = h("span", { class: "lab-cells" });
  const node = h("div", { class: "lab-table", "data-id": id, style: { "--hue": hue(place) } }, badge, box);
  const cells = [];
  const keys = [];
  return {
    node,
    fill(table, chosen, size) {
      node.classList.toggle("lab-selected", chosen);
      if (badge.title !== `${table.tokens} tokens stored`) badge.title = `${table.tokens} tokens stored`;
      table.cells.forEach(([block, tokens, owners, fresh], logical) => {
        const key = [block, tokens, owners, fresh, chosen, size].join();
        if (keys[logical] === key) return;
        keys[logical] = key;
        const cell = (cells[logical] ??= h("span"));
        cell.className = "lab-cell" + (owners > 1 ? " lab-shared" : "") + (fresh ? " lab-fresh" : "");
        cell.style.setProperty("--fill", (100 * tokens) / size + "%");
        cell.title = `logical ${logical} → physical ${block}: ${tokens} tokens` + (owners > 1 ? `, shared by ${owners}` : "");
        cell.replaceChildren(...(chosen ? [h("small", {}, String(logical))] : []), String(block));
      });
      cells.length = keys.length = table.cells.length;
      setText(more, table.left_out ? `and ${table.left_out} more` : "");
      arrange(box, table.left_out ? [...cells, more] : cells);
    },
  };
}

/** The contiguous layout: one bar an extent, used and reserved part told apart, and the holes between them. */
export function renderExtents(view, rows) {
  setText(view.tablesTitle, "extents and holes, in pool order");
  view.tableRows = null;
  const longest = Math.max(1, ...rows.map((row) => row.tokens));
  view.tables.replaceChildren(
    ...rows.map((row) => {
      const hole = row.number === null;
      const blocks = row.first === row.last ? `block ${row.first}` : `blocks ${row.first}–${row.last}`;
      const words = hole ? `hole: ${number(row.tokens)} tokens free` : `${number(row.used)} of ${number(row.tokens)} tokens used, the rest is reserved`;
      return h("div", { class: "lab-extent" + (hole ? " lab-hole" : "") + (row.id && row.id === view.look.selected ? " lab-selected" : ""), title: `${blocks}: ${words}`,
        style: hole ? {} : { "--hue": hue(row.number) } },
        h("span", { class: "lab-badge", style: hole ? {} : { background: hue(row.number) } }, hole ? "·" : row.letter),
        h("span", { class: "lab-bar-track", style: { width: Math.max(6, (60 * row.tokens) / longest) + "%" } },
          h("span", { class: "lab-bar-used", style: { width: (100 * row.used) / Math.max(1, row.tokens) + "%" } })),
        h("small", {}, hole ? `${number(row.tokens)} free` : `${number(row.used)}/${number(row.tokens)}`));
    }),
  );
}

export function renderTiles(view, tiles) {
  if (!tiles) return;
  const head = h("tr", {}, h("th", { scope: "col" }, h("span", { class: "lab-tilehead" }, "Latency"), h("small", {}, " ms")),
    h("th", { scope: "col" }, "newest"), QUANTILES.map((name) => h("th", { scope: "col" }, name)),
    h("th", { scope: "col" }, h("button", { type: "button", class: "lab-link", title: "Show the mean, or the number of samples (v)", onclick: () => view.pressMean() }, view.showMean ? "mean" : "n")));
  const body = tiles.latency.map((row) =>
    h("tr", { title: row.text, "data-name": row.name }, h("th", { scope: "row" }, row.label), h("td", {}, spark(row.spark, row.label)),
      QUANTILES.map((name) =>
        name === "p99" && row.few
          ? h("td", { class: "lab-few", title: "Fewer than 100 samples: hardly more than the maximum." }, milliseconds(row[name]))
          : h("td", {}, milliseconds(row[name]))),
      h("td", { class: "lab-n" }, view.showMean ? milliseconds(row.mean) : brief(row.count))));
  const gauges = tiles.gauges.map((g) =>
    h("div", { class: "lab-gauge", title: g.text, "data-name": g.name }, h("span", {}, g.label),
      h("b", {}, g.value === null ? "n/a" : number(g.value, g.unit === "" || g.unit === "%" ? 0 : 1), g.value !== null && g.unit ? h("small", {}, " " + g.unit) : null)));
  view.tiles.replaceChildren(
    h("table", {}, h("thead", {}, head), h("tbody", {}, body)),
    h("div", { class: "lab-gauges" }, gauges),
    h("p", { class: "lab-note" }, "Newest 200 requests, linear interpolation." + (tiles.slow ? ` ${tiles.slow} in slow motion left out.` : "")),
  );
}

function spark(values, label) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 48 14");
  svg.setAttribute("class", "lab-spark");
  const words = values.length
    ? `${label}, the newest ${values.length}: ${milliseconds(Math.min(...values))} to ${milliseconds(Math.max(...values))} ms, now ${milliseconds(values.at(-1))} ms`
    : `${label}: no value yet`;
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", words);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = words;
  svg.append(title);
  if (values.length) {
    const top = Math.max(...values) || 1;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const step = values.length > 1 ? 46 / (values.length - 1) : 0;
    line.setAttribute("points", values.map((v, i) => `${(1 + i * step).toFixed(1)},${(13 - (12 * v) / top).toFixed(1)}`).join(" "));
    svg.append(line);
    if (values.length === 1) {
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      dot.setAttribute("cx", "2");
      dot.setAttribute("cy", "3");
      dot.setAttribute("r", "1.5");
      svg.append(dot);
    }
  }
  return svg;
}

export function renderStory(view, entries) {
  const key = JSON.stringify(entries.map((e) => [e.step, e.text]));
  if (view.storyKey === key) return;
  view.storyKey = key;
  if (!entries.length) {
    setText(view.definition, "");
    view.story.replaceChildren(h("li", { class: "lab-hint" }, "Arrivals, admissions, preemptions and finishes are told here, each with its step."));
    return;
  }
  view.story.replaceChildren(
    ...entries.map((entry) =>
      h("li", { "data-kind": entry.kind, style: entry.number === null ? {} : { "--hue": hue(entry.number) } },
        h("button", {
          type: "button", title: (entry.definition ? entry.definition + " " : "") + "Show this step.", onclick: () => view.goto(entry.step),
          onmouseenter: () => setText(view.definition, entry.definition), onfocus: () => setText(view.definition, entry.definition),
        },
          h("span", { class: "lab-when" }, `Step ${entry.step}`), h("span", {}, entry.text)))),
  );
}

export function renderFocus(view, focus) {
  if (!focus) {
    if (view.focusId) view.markBlock(null);
    view.focusId = null;
    view.focus.replaceChildren(h("h2", {}, "Text"), h("p", { class: "lab-hint lab-always" }, "Select a request to read its whole text. Then select a token to see its step, its candidates, and where its K and V lie."));
    return;
  }
  if (view.focusId !== focus.id) {
    view.focusId = focus.id;
    view.focusTitle = h("h2", {});
    view.focusPrompt = h("details", { class: "lab-whole" });
    view.focusText = h("p", { class: "lab-tokens" });
    view.focusToken = h("div", { class: "lab-token", role: "status" });
    view.focusCache = h("p", { class: "lab-note" });
    view.focus.replaceChildren(view.focusTitle, view.focusPrompt, view.focusCache, view.focusText, view.focusToken);
    view.focusPrompt.replaceChildren(h("summary", {}, `prompt, ${number(focus.prompt_tokens)} tokens`), h("p", {}, focus.prompt));
    view.focusCount = 0;
  }
  view.focusTitle.replaceChildren(h("span", { class: "lab-badge", style: { background: hue(focus.number) } }, focus.letter), ` ${focus.tokens.length} tokens`,
    h("span", { class: "lab-count" }, focus.cached_tokens ? `${focus.cached_tokens} prompt tokens from the cache` : ""));
  setText(view.focusCache, focus.cache_note ? `Prefix cache: ${number(focus.cached_tokens)} of ${number(focus.prompt_tokens)} prompt tokens; ${focus.cache_note}.` : "");
  if (focus.tokens.length < view.focusCount || focus.left_out) {
    view.focusText.replaceChildren();
    view.focusCount = 0;
  }
  const fresh = focus.tokens.slice(view.focusCount).map(([text, step, index]) =>
    h("span", {
      role: "button", tabIndex: 0, title: `token ${index}, step ${step}`, "data-index": index,
      onclick: (e) => showToken(view, focus.id, index, e.currentTarget),
      onkeydown: (e) => { if (e.key === "Enter") showToken(view, focus.id, index, e.currentTarget); },
    }, text === "" ? "·" : text));
  const atEnd = view.focusText.scrollHeight - view.focusText.scrollTop - view.focusText.clientHeight < 24;
  view.focusText.append(...fresh);
  view.focusCount = focus.tokens.length;
  if (fresh.length && atEnd) view.focusText.scrollTop = view.focusText.scrollHeight;
  if (focus.error) view.focusToken.replaceChildren(h("p", { class: "lab-message" }, focus.error));
}

async function showToken(view, request, index, node) {
  for (const other of view.focusText.querySelectorAll(".lab-selected")) other.classList.remove("lab-selected");
  node.classList.add("lab-selected");
  const answer = await fetch("/lab/api/token?" + new URLSearchParams({ lab: view.lab, request, index }));
  const token = await answer.json();
  if (!answer.ok) {
    view.focusToken.replaceChildren(h("p", { class: "lab-message" }, token.error));
    return;
  }
  const time = token.itl_ms === null ? (token.ttft_ms === null ? "" : ` · TTFT ${milliseconds(token.ttft_ms)} ms`) : ` · ITL ${milliseconds(token.itl_ms)} ms`;
  const place = token.block === null
    ? token.last ? "its K and V are not computed: it is the last token" : "its block is not held any more"
    : `K and V in block ${token.block} (logical ${token.logical}), slot ${token.offset}`;
  view.markBlock(token.block, request);
  const tie = token.near_tie ? h("p", { class: "lab-note" }, "Near tie: the two likeliest differ by less than one percentage point. Another number format or batch may choose the other one.") : null;
  view.focusToken.replaceChildren(
    h("p", {}, h("button", { type: "button", class: "lab-link", onclick: () => view.goto(token.step) }, `step ${token.step}`), time, h("br"), place), tie ?? "",
    h("ul", { class: "lab-candidates" }, token.top.map(([text, probability, taken]) =>
      h("li", { class: taken ? "lab-taken" : "", style: { "--p": 100 * probability + "%" } }, h("code", {}, JSON.stringify(text)), h("span", {}, number(100 * probability, 1) + " %")))),
  );
}
