// The live view: one stream in, four linked pictures and the panels out. A viewer's cursor in time is this tab's own.
import { h, post, setText } from "./dom.js";
import { Charts } from "./charts.js";
import { engineForm } from "./form.js";
import { renderExtents, renderFocus, renderHead, renderRequests, renderStory, renderTables, renderTiles } from "./panels.js";
import { scenes } from "./scenes.js";
import { modelPanel, roomNotes, sharePanel } from "./share.js";
import { trafficPanel } from "./traffic.js";
import { samplingForm } from "./sampling.js";
import { transport } from "./transport.js";

const EMPTY = {
  batch: "Each step adds a bar here: the tokens that every request contributes, against the token budget.",
  timeline: "Each request gets a row here: it queues, computes its prompt, then makes one token a step.",
  pool: "Each cell is a block of KV memory. It takes its owner's colour when a request fills it.",
  requests: "Requests appear here, each with its letter, its colour, and its text as it is made.",
};
const LEGEND = [
  ["prefill", "prefill"], ["decode", "decode"], ["recompute", "recompute"], ["cached", "from cache"], ["padding", "padding"],
];

export function start(root, data) {
  const view = new View(root, data);
  view.open();
  return { stop: () => view.close(), refresh: () => view.retheme() };
}

class View {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.lab = data.lab;
    this.viewer = Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => (b % 36).toString(36)).join("");
    this.sections = {};
    this.follows = data.lab.startsWith("follow:");
    this.projector = Boolean(data.projector);
    this.looksOn = this.follows || this.projector;
    this.look = { theme: this.projector ? "dark" : themeOf(root), queue: false, ...lookOf(new URLSearchParams(location.search)) };
    this.dirty = new Set();
    this.failures = 0;
    this.build();
    window.__lab = this.probe = { figures: {}, sections: this.sections, look: this.look, draws: 0, streams: 0 };
    this.charts = new Charts(data.plotly, this.frames, this.probe, (pick) => this.pick(pick), this.projector ? 1.6 : 1);
    this.onVisible = () => (document.hidden ? this.disconnect() : this.connect());
    this.onKey = (event) => this.key(event);
    this.onSize = () => this.measure();
  }

  // -- life ---------------------------------------------------------------------------------------------------------------

  open() {
    document.addEventListener("visibilitychange", this.onVisible);
    document.addEventListener("keydown", this.onKey);
    window.addEventListener("resize", this.onSize);
    this.scheme = window.matchMedia("(prefers-color-scheme: dark)");
    this.onScheme = () => setTimeout(() => this.retheme(), 150);
    this.scheme.addEventListener("change", this.onScheme);
    this.measure();
    setTimeout(this.onSize, 600);
    this.connect();
  }

  close() {
    this.bar.halt();
    this.disconnect();
    document.removeEventListener("visibilitychange", this.onVisible);
    document.removeEventListener("keydown", this.onKey);
    window.removeEventListener("resize", this.onSize);
    this.scheme.removeEventListener("change", this.onScheme);
    this.charts.close();
  }

  measure() {
    if (this.projector) this.fit();
    this.root.style.setProperty("--lab-top", Math.max(0, Math.round(this.root.offsetTop)) + "px");
    const links = [...document.querySelectorAll("header.stAppHeader :is(a, button)")].map((link) => link.getBoundingClientRect());
    const wide = window.innerWidth >= 1100;
    const right = Math.max(0, ...links.filter((box) => box.width).map((box) => box.right));
    this.root.style.setProperty("--lab-nav", Math.round(right && wide ? Math.max(0, right - 118) : right) + "px");
  }

  /** A projector's page is laid out for 1920 × 1080; a smaller wide screen shows the same page smaller. */
  fit() {
    const share = window.innerWidth >= 1100 ? Math.min(1, window.innerWidth / 1920, window.innerHeight / 1080) : 1;
    this.root.style.setProperty("--lab-fit", share.toFixed(4));
  }

  retheme() {
    const theme = this.projector ? "dark" : themeOf(this.root);
    this.root.dataset.theme = theme;
    this.measure();
    if (theme !== this.look.theme) this.setLook({ theme });
  }

  // -- stream -------------------------------------------------------------------------------------------------------------

  query() {
    const query = new URLSearchParams({ lab: this.lab, viewer: this.viewer, theme: this.look.theme });
    if (this.look.selected) query.set("selected", this.look.selected);
    if (this.look.step !== null) query.set("step", this.look.step);
    query.set("scale", this.look.scale);
    if (this.look.queue) query.set("queue", "1");
    if (this.projector) query.set("mirror", "1");
    return query;
  }

  /** What sets up the same lab, looked at in the same way, somewhere else: nothing in it leads back to this lab. */
  linkQuery() {
    const query = new URLSearchParams(this.sections.room?.link || "");
    if (this.look.selected) query.set("selected", this.look.selected);
    if (this.look.step !== null) query.set("step", this.look.step);
    if (this.look.scale !== "linear") query.set("scale", this.look.scale);
    return query.toString();
  }

  /** The address of this page says the same, so that a reload, or a visit after the lab was released, finds it all again. */
  keepAddress() {
    if (this.looksOn || this.lab.startsWith("run:") || !this.sections.room || location.pathname !== "/") return;
    const query = new URLSearchParams({ lab: this.lab });
    for (const [name, value] of new URLSearchParams(this.linkQuery())) query.set(name, value);
    const learner = new URLSearchParams(location.search).get("learner");
    if (learner) query.set("learner", learner);
    const wanted = "?" + query;
    if (wanted !== location.search && wanted.length < 8000) history.replaceState(history.state, "", wanted);
  }

  wake() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  connect() {
    this.disconnect();
    if (document.hidden || this.refused) return;
    const source = new EventSource("/lab/api/stream?" + this.query());
    this.source = source;
    source.onopen = () => {
      this.failures = 0;
      this.probe.streams += 1;
      this.trouble("");
      this.sendLook();
    };
    source.onmessage = (event) => this.take(JSON.parse(event.data));
    source.onerror = () => {
      this.failures += 1;
      source.close();
      if (this.source === source) this.source = null;
      this.askWhy();
      if (this.failures > 1 && !this.refused) this.trouble("The lab's server does not answer. Trying again. If it was restarted, reload the page.");
      this.retry = setTimeout(() => (this.failures > 3 ? this.poll() : this.connect()), Math.min(400 * this.failures, 3000));
    };
  }

  /** A stream that fails does not say why; the same question, asked once, does. */
  async askWhy() {
    try {
      const answer = await fetch("/lab/api/state?" + this.query());
      if (!answer.ok) await this.tellRefusal(answer);
    } catch {
      /* no answer at all: the stream's own message says so */
    }
  }

  /** What the server says instead of a state; a refusal is final, so nobody asks again. */
  async tellRefusal(answer) {
    const found = await answer.json();
    this.refused = answer.status === 403;
    if (this.refused) this.disconnect();
    this.trouble(sentence(found.error));
  }

  disconnect() {
    clearTimeout(this.retry);
    if (this.source) this.source.close();
    this.source = null;
  }

  async poll() {
    try {
      const answer = await fetch("/lab/api/state?" + this.query());
      if (answer.ok) {
        this.take(await answer.json());
        this.polls = (this.polls || 0) + 1;
        this.trouble("");
      } else await this.tellRefusal(answer);
    } catch {
      /* the message already says that the server does not answer */
    }
    if (!document.hidden && !this.refused) this.retry = setTimeout(() => ((this.polls || 0) % 10 === 9 ? this.connect() : this.poll()), 1000);
  }

  take(news) {
    for (const [name, value] of Object.entries(news)) {
      this.sections[name] = value;
      this.dirty.add(name);
    }
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  // -- commands -----------------------------------------------------------------------------------------------------------

  async command(verb, body = {}, where = this.message) {
    setText(where, "");
    try {
      return await post(verb, { lab: this.lab, ...body });
    } catch (error) {
      setText(where, sentence(error.message));
      return null;
    }
  }

  setLook(change) {
    Object.assign(this.look, change);
    this.dirty.add("clock");
    this.dirty.add("requests");
    this.scale.value = this.look.scale;
    this.queueButton.setAttribute("aria-pressed", String(this.look.queue));
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
    return this.sendLook();
  }

  async sendLook() {
    if (!this.source) return;
    try {
      await post("view", { lab: this.lab, viewer: this.viewer, ...this.look });
    } catch {
      /* the stream reopens with the newest look in its address */
    }
  }

  /** The next or previous request of the list. */
  selectNext(by) {
    const ids = [...this.requests.children].map((node) => node.dataset.id);
    if (!ids.length) return;
    const at = ids.indexOf(this.look.selected);
    this.markBlock(null);
    this.setLook({ selected: ids[at < 0 ? (by > 0 ? 0 : ids.length - 1) : Math.max(0, Math.min(ids.length - 1, at + by))] });
  }

  /** Frame the block of the pool where a chosen token's K and V lie, in the steps in which its request holds that block. */
  markBlock(block, request = null) {
    this.token = block === null ? null : { block, request };
    this.showMark();
  }

  showMark() {
    const table = this.token && (this.sections.tables || []).find((row) => row.id === this.token.request);
    this.probe.marked = table?.cells.some((cell) => cell[0] === this.token.block) ? this.token.block : null;
    this.charts.mark(this.probe.marked);
  }

  pressMean() {
    this.showMean = !this.showMean;
    renderTiles(this, this.sections.tiles);
  }

  select(id) {
    this.markBlock(null);
    this.setLook({ selected: this.look.selected === id ? null : id });
  }

  pick({ request, step, block }) {
    const change = {};
    if (block !== undefined) {
      const owner = (this.sections.tables || []).find((table) => table.cells.some((cell) => cell[0] === block));
      change.selected = owner ? owner.id : null;
    }
    if (step !== undefined) change.step = step;
    if (request !== undefined) change.selected = request;
    this.setLook(change);
  }

  goto(step, playing = false) {
    if (!playing) this.bar.halt();
    const clock = this.sections.clock;
    if (!clock || clock.last < 0) return;
    this.setLook({ step: step === null ? null : Math.max(clock.first, Math.min(step, clock.last)) });
  }

  async sendPrompt() {
    const prompt = this.prompt.value;
    const options = this.options();
    if (!options) return;
    if (!prompt.trim()) {
      setText(this.message, "The prompt is empty: type at least one character that is not a space.");
      this.prompt.focus();
      return;
    }
    this.setLook({ step: null });
    const sent = await this.command("send", { prompt, chat: this.mode.value === "chat", ...options });
    if (sent) this.prompt.select();
  }

  async sendSamples() {
    const options = this.options();
    if (!options) return;
    this.setLook({ step: null });
    delete options.copies;
    await this.command("samples", options);
  }

  options() {
    const found = {};
    for (const [name, input] of Object.entries(this.inputs)) {
      const value = Number(input.value);
      if (input.value === "" || !Number.isFinite(value)) {
        setText(this.message, `${name} must be a number.`);
        return null;
      }
      found[name] = value;
    }
    const more = this.sampling.read(this.message);
    return more && { ...found, ...more };
  }

  key(event) {
    const at = event.target;
    if (this.projector && this.follows) return;
    if (event.metaKey || event.altKey || (event.ctrlKey && event.key !== "Enter")) return;
    if (at === this.prompt && event.key === "Enter" && (event.ctrlKey || !event.shiftKey)) {
      event.preventDefault();
      this.sendPrompt();
      return;
    }
    if (at === this.inputs.copies && event.key === "Enter") {
      event.preventDefault();
      this.sendPrompt();
      return;
    }
    if (at.closest && at.closest("input, textarea, select, [contenteditable]")) {
      if (event.key === "Escape") at.blur();
      return;
    }
    if (event.key === " " && at.closest && at.closest("button, summary, [role=button], a")) return;
    const clock = this.sections.clock || { first: 0, last: -1 };
    const here = this.look.step ?? clock.last;
    const keys = {
      " ": () => this.bar.toggle(),
      s: () => this.bar.step(1),
      S: () => this.bar.step(10),
      ArrowLeft: () => this.goto(here - 1),
      ArrowRight: () => (here + 1 >= clock.last ? this.goto(null) : this.goto(here + 1)),
      Home: () => this.goto(clock.first),
      End: () => this.goto(null),
      l: () => this.goto(null),
      p: () => this.bar.play(),
      n: () => this.prompt.focus(),
      d: () => this.sendSamples(),
      c: () => this.inputs.copies.select(),
      C: () => this.clear(),
      r: () => this.bar.slower(),
      g: () => this.bar.focusSlider(),
      j: () => this.selectNext(1),
      k: () => this.selectNext(-1),
      q: () => this.setLook({ queue: !this.look.queue }),
      b: () => this.setLook({ scale: this.look.scale === "root" ? "linear" : "root" }),
      v: () => this.pressMean(),
      m: () => this.bar.jump("+preempt"), M: () => this.bar.jump("-preempt"),
      a: () => this.bar.jump("+admit"), A: () => this.bar.jump("-admit"),
      f: () => this.bar.jump("+finish"), F: () => this.bar.jump("-finish"),
      e: () => this.bar.jump("+evict"), E: () => this.bar.jump("-evict"),
      x: () => this.look.selected && this.command("abort", { request_id: this.look.selected }),
      X: () => this.command("abort"),
      Escape: () => this.setLook({ selected: null }),
      "?": () => (this.keys.open = !this.keys.open),
    };
    const action = keys[event.key];
    if (!action || (this.follows && "sSndcCrxX ".includes(event.key))) return;
    event.preventDefault();
    action();
  }

  // -- drawing ------------------------------------------------------------------------------------------------------------

  draw() {
    this.frame = null;
    const dirty = this.dirty;
    this.dirty = new Set();
    const s = this.sections;
    // The pictures first: Plotly measures as it draws, and whatever else has changed by then is laid out for each measure.
    for (const name of ["batch", "timeline", "pool"]) if (dirty.has(name) && s[name]) this.charts.draw(name, s[name]);
    if (dirty.has("head") || dirty.has("clock")) {
      renderHead(this, s.head);
      this.bar.render(s.clock, s.head, this.look);
      this.welcome();
    }
    if (dirty.has("head")) this.form.fill(s.head);
    if (dirty.has("room") && s.room) {
      this.scenes.fill(s.room);
      this.notes.fill(s.room);
      this.traffic.fill(s.room);
      if (!dirty.has("head")) this.welcome();
    }
    if (dirty.has("room") || dirty.has("clock")) this.keepAddress();
    if (dirty.has("trouble")) this.trouble(s.trouble);
    if (dirty.has("requests")) renderRequests(this, s.requests || []);
    if (dirty.has("tables")) this.showMark();
    if (dirty.has("tables") || dirty.has("extents")) {
      if (s.extents) renderExtents(this, s.extents);
      else renderTables(this, s.tables || []);
    }
    if (dirty.has("tiles")) renderTiles(this, s.tiles);
    if (dirty.has("story")) renderStory(this, s.story || []);
    if (dirty.has("focus")) renderFocus(this, s.focus);
    if (dirty.has("words")) this.fillWords(s.words || {});
    if (dirty.has("failed")) this.showFailures(s.failed || {});
    if (dirty.has("batch") && s.batch) this.announce(s.batch);
    if (dirty.has("pool") && s.pool)
      setText(this.counts.pool, `${s.pool.used} of ${s.pool.total} blocks in use` + (s.pool.cached ? ` · ${s.pool.cached} cached` : "") +
        (s.pool.per_cell > 1 ? ` · one cell is ${s.pool.per_cell} blocks` : "") + (s.pool.complete ? "" : " · its records are gone"));
    if (dirty.has("timeline") && s.timeline)
      setText(this.counts.timeline, s.timeline.total > s.timeline.shown ? `${s.timeline.shown} of ${s.timeline.total} requests: the newest at work in these steps` : "");
    this.root.classList.toggle("lab-empty", !s.requests || s.requests.length === 0);
    this.root.classList.toggle("lab-past", this.look.step !== null);
    this.probe.draws += 1;
    if (this.probe.draws === 1) setTimeout(() => this.charts.begin());
  }

  /** One line on the chosen step; a changed scale is said, never silent. */
  announce(batch) {
    setText(this.moment, batch.moment || "");
    if (this.top !== undefined && this.top !== batch.top) {
      setText(this.scaleNote, `The scale is now 0–${batch.top.toLocaleString("en-US")} tokens.`);
      clearTimeout(this.scaleTimer);
      this.scaleTimer = setTimeout(() => setText(this.scaleNote, ""), 5000);
    }
    this.top = batch.top;
  }

  /** A panel whose data can't be made says so, keeps what it has, and recovers by itself. */
  showFailures(failed) {
    for (const [name, panel] of Object.entries(this.panels)) {
      let line = panel.querySelector(":scope > .lab-failed");
      if (!failed[name]) line?.remove();
      else {
        if (!line) panel.querySelector("h2")?.after((line = h("p", { class: "lab-failed", role: "status" })));
        if (!line) panel.prepend((line = h("p", { class: "lab-failed", role: "status" })));
        setText(line, failed[name]);
      }
    }
  }

  fillWords(words) {
    this.words.replaceChildren(...Object.values(words).flatMap((text) => {
      const [word, ...rest] = text.split(": ");
      return [h("dt", {}, word), h("dd", {}, rest.join(": "))];
    }));
  }

  trouble(text) {
    setText(this.troubleLine, text || "");
    this.troubleLine.hidden = !text;
  }

  welcome() {
    const head = this.sections.head;
    if (!head) return;
    const idle = !(this.sections.clock?.last >= 0 || this.sections.requests?.length);
    const down = head.state === "stopped" || head.state === "failed";
    const ready = head.state === "ready";
    const saved = head.state === "saved";
    this.root.classList.toggle("lab-saved", saved);
    this.hero.hidden = saved || (ready && !idle) || (this.looksOn && ready);
    if (this.hero.hidden) return;
    if (ready) this.scenes.load();
    const room = this.sections.room;
    const first = this.scenes.first();
    const brought = room?.prepared ? room.scene?.title || "the link's traffic" : "";
    this.hero.dataset.state = head.state;
    setText(this.heroTitle, ready ? "A real engine, ready to be watched" : down ? "The engine is not running" : "The model is loading");
    setText(
      this.heroText,
      ready
        ? brought ? "This link brought its settings and its traffic. Start it when you are ready."
          : "A scene sends requests to the engine. Every picture shows what it really does."
        : down ? sentence(head.error || "its process ended") : sentence(head.stage || "starting the engine's process"),
    );
    this.heroBar.hidden = ready || down;
    if (head.progress === null || head.progress === undefined) this.heroBar.removeAttribute("value");
    else this.heroBar.value = head.progress;
    this.heroStart.hidden = !ready || !(brought || first);
    setText(this.heroStart, brought ? `Start: ${brought}` : first ? `Start: ${first.title}` : "");
    this.heroStart.title = brought ? room.scene?.look || "" : first?.look || "";
    this.scenes.cards.hidden = !ready;
    this.heroRestart.hidden = !down;
  }

  // -- skeleton -----------------------------------------------------------------------------------------------------------

  build() {
    this.root.dataset.theme = this.look.theme;
    this.root.classList.toggle("lab-follows", this.follows);
    this.root.classList.toggle("lab-projected", this.projector);
    document.body.classList.toggle("lab-body-projected", this.projector);
    this.counts = {};
    this.frames = {};
    this.panels = {};
    const frame = (name, title, help, extra, below) => {
      this.counts[name] = h("span", { class: "lab-count" });
      this.frames[name] = h("div", { class: "lab-chart", role: "img", "aria-label": title });
      return this.panels[name] = h(
        "section", { class: "lab-frame lab-" + name, "aria-label": title },
        h("h2", { title: help }, title, this.counts[name], extra), below,
        h("div", { class: "lab-plot" }, this.frames[name], h("p", { class: "lab-hint" }, EMPTY[name])),
      );
    };
    const legend = h(
      "span", { class: "lab-legend", "aria-hidden": "true" },
      LEGEND.map(([kind, word]) => h("span", {}, h("i", { class: "lab-swatch lab-" + kind + "-swatch" }), word)),
    );
    this.moment = h("span", {});
    this.scaleNote = h("span", { class: "lab-announce", role: "status" });
    this.queueButton = h("button", {
      type: "button", class: "lab-queue", "aria-pressed": "false", title: "Number the free blocks by their place in the free queue (q); 1 is taken next",
      onclick: () => this.setLook({ queue: !this.look.queue }),
    }, "Free queue");
    const scale = this.scale = h(
      "select", { title: "√ keeps decodes visible beside a long prompt (b)", "aria-label": "Scale of the batch", onchange: () => this.setLook({ scale: scale.value }) },
      h("option", { value: "linear" }, "linear"), h("option", { value: "root", selected: this.look.scale === "root" }, "√ scale"),
    );
    this.troubleLine = h("p", { class: "lab-trouble", role: "alert", hidden: true });
    this.header = h("header", { class: "lab-head" });
    this.bar = transport(this);
    this.form = engineForm(this);
    this.scenes = scenes(this);
    this.traffic = trafficPanel(this);
    this.notes = roomNotes(this);
    this.scenes.node.addEventListener("toggle", () => this.scenes.load());
    this.requests = h("ul", { class: "lab-requests", "aria-label": "Requests" });
    this.tables = h("div", { class: "lab-tables" });
    this.tablesTitle = h("span", { class: "lab-count" });
    this.tiles = h("div", { class: "lab-tiles" });
    this.story = h("ol", { class: "lab-story", "aria-label": "What happened" });
    this.definition = h("p", { class: "lab-definition", role: "status" });
    this.focus = h("div", { class: "lab-focus" });
    this.root.replaceChildren(
      this.header,
      h("aside", { class: "lab-left", "aria-label": "Controls" }, this.sender(), this.scenes.node, this.traffic.node, this.form.node,
        ...(this.data.owner ? [modelPanel(this).node] : []), sharePanel(this).node, ...this.keyList(), this.notes.waits),
      h(
        "main", { class: "lab-centre" },
        this.buildHero(),
        this.scenes.banner,
        frame("batch", "Batch composition", "Tokens that each request contributed to each step; with more than 12 requests in a step they are stacked by kind. The strip above counts who waits.", [legend, scale],
          h("p", { class: "lab-moment" }, this.moment, this.scaleNote)),
        frame("timeline", "Request timelines", "The life of each request, on the same steps as the batch above."),
        frame("pool", "KV block pool", "Every physical block of KV memory; colour is the owner.",
          h("span", { class: "lab-actions" }, this.queueButton)),
        this.panels.tiles = h("section", { class: "lab-frame lab-latency", "aria-label": "Latency and load" }, this.tiles),
      ),
      h(
        "aside", { class: "lab-right", "aria-label": "Requests, block tables and log" },
        this.panels.requests = h("section", { class: "lab-frame lab-list", "aria-label": "Requests" },
          h("h2", {}, "Requests", h("span", { class: "lab-actions" },
            h("button", { type: "button", title: "Stop every request (X)", onclick: () => this.command("abort") }, "Stop all"),
            h("button", { type: "button", title: "Empty the lab: stop all, forget all (C)", onclick: () => this.clear() }, "Clear"))),
          h("p", { class: "lab-hint" }, EMPTY.requests), this.requests),
        this.panels.tables = h("section", { class: "lab-frame lab-blocks", "aria-label": "Block tables" },
          h("h2", { title: "For each request: logical block 0, 1, 2 … → physical block." }, "Block tables", this.tablesTitle), this.tables),
        this.panels.focus = h("section", { class: "lab-frame lab-text", "aria-label": "Text of the selected request" }, this.focus),
        this.panels.story = h("section", { class: "lab-frame lab-log", "aria-label": "What happened" }, h("h2", {}, "What happened"), this.story, this.definition),
      ),
      h("footer", { class: "lab-foot" }, this.notes.notice, this.troubleLine, this.bar.node),
    );
    renderFocus(this, null);
    renderTables(this, []);
  }

  async clear() {
    const done = await this.command("clear");
    if (done) this.setLook({ selected: null, step: null });
  }

  buildHero() {
    this.heroTitle = h("h1", {});
    this.heroText = h("p", {});
    this.heroBar = h("progress", { max: 1, "aria-label": "Loading" });
    this.heroStart = h("button", { type: "button", class: "lab-big", onclick: () => this.begin() });
    this.heroRestart = h("button", { type: "button", class: "lab-big lab-restart", onclick: () => this.restart() }, "Restart the engine");
    this.hero = h(
      "div", { class: "lab-hero", hidden: true, role: "status" },
      this.heroTitle, this.heroText, this.heroBar, this.heroStart, this.heroRestart, this.scenes.cards,
    );
    return this.hero;
  }

  begin() {
    if (this.sections.room?.prepared) return this.traffic.begin();
    return this.scenes.start(this.scenes.first().id);
  }

  async restart() {
    this.heroRestart.disabled = true;
    await this.command("restart");
    this.heroRestart.disabled = false;
  }

  sender() {
    const id = (name) => "lab-" + name;
    const field = (name, label, props) => {
      this.inputs[name] = h("input", { id: id(name), type: "number", ...props });
      return h("label", { htmlFor: id(name), title: props.title }, label, this.inputs[name]);
    };
    this.inputs = {};
    this.sampling = samplingForm();
    this.message = h("p", { class: "lab-message", role: "alert" });
    this.prompt = h("textarea", {
      id: id("prompt"), rows: 3, placeholder: "Type a prompt. Enter sends it.", value: "Why does a cat always land on its feet?",
    });
    this.mode = h(
      "select", { id: id("mode"), title: "Chat wraps the prompt in the model's chat template; raw sends it as it is." },
      h("option", { value: "chat" }, "chat"), h("option", { value: "raw" }, "raw"),
    );
    return h(
      "section", { class: "lab-send", "aria-label": "Send" },
      h("label", { htmlFor: id("prompt") }, "Prompt"), this.prompt,
      h(
        "div", { class: "lab-fields" },
        field("max_tokens", "max tokens", { value: 96, min: 1, step: 1, title: "Most tokens to generate." }),
        field("temperature", "temperature", { value: 0.7, min: 0, step: 0.1, title: "0 always takes the likeliest token." }),
        h("label", { htmlFor: id("mode") }, "mode", this.mode),
        field("copies", "copies", { value: 1, min: 1, max: 64, step: 1, title: "Send the prompt this many times." }),
      ),
      h(
        "div", { class: "lab-buttons" },
        h("button", { type: "button", class: "lab-primary", id: id("send"), onclick: () => this.sendPrompt() }, "Send"),
        h("button", { type: "button", id: id("samples"), title: "Send four sample prompts (d)", onclick: () => this.sendSamples() },
          "Four sample prompts"),
      ),
      this.message,
      this.sampling.node,
    );
  }

  keyList() {
    const rows = [
      ["space", "pause or run"], ["s", "one step"], ["S", "ten steps"], ["r", "slower, then full speed"], ["← →", "move the cursor in time"],
      ["Home", "first step"], ["g", "the slider"], ["p", "play from here"], ["l or End", "live"],
      ["m a f e", "next preemption, admission, finish, eviction"], ["M A F E", "the last one"],
      ["n", "type a prompt; Enter sends it"], ["c", "number of copies; Enter sends them"], ["d", "four sample prompts"],
      ["j k", "select the next or previous request"], ["x", "stop the selected request"], ["X", "stop all"], ["C", "clear"],
      ["q", "places in the free queue"], ["b", "scale of the batch"], ["v", "mean latencies"], ["Esc", "select nothing"], ["?", "this list"],
    ];
    this.keys = h("details", { class: "lab-keys" }, h("summary", {}, "Keys"),
      h("dl", {}, rows.flatMap(([keys, what]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, what)])));
    this.words = h("dl", { class: "lab-wordlist" });
    return [this.keys, h("details", { class: "lab-words" }, h("summary", {}, "Words"), this.words)];
  }
}

function lookOf(query) {
  const step = query.get("step");
  return {
    selected: query.get("selected") || null,
    step: step !== null && /^\d{1,9}$/.test(step) ? Number(step) : null,
    scale: query.get("scale") === "root" ? "root" : "linear",
  };
}

export function sentence(text) {
  const first = /^[a-z]+\b(?![_=])/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return /[.:?]$/.test(first) ? first : first + ".";
}

function themeOf(root) {
  const colour = getComputedStyle(root).getPropertyValue("--st-background-color").trim() || getComputedStyle(document.body).backgroundColor;
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = colour;
  const hex = probe.fillStyle;
  if (!/^#[0-9a-f]{6}$/i.test(hex)) return "light";
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 110 ? "dark" : "light";
}
