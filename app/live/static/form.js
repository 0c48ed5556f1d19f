// The engine form: every knob with its name, unit, limits and what it trades. What is typed stays until it is applied.
import { h, post, setText } from "./dom.js";

const INT = (name, unit, least, help) => ({ name, unit, least, help, kind: "int" });
const FLAG = (name, help) => ({ name, help, kind: "flag" });
const CHOICE = (name, choices, help) => ({ name, choices, help, kind: "choice" });

const KNOBS = [
  INT("max_num_batched_tokens", "tokens a step", 1, "Token budget of a step. Larger: prompts finish sooner, but tokens of others wait longer behind them."),
  INT("max_num_seqs", "requests", 1, "Seats in the batch. Larger: more throughput and memory use, slower tokens for each request."),
  INT("max_model_len", "tokens", 1, "Longest prompt plus output. Longer requests are refused."),
  INT("block_size", "tokens a block", 1, "Tokens in one KV block. Larger: shorter block tables, more waste in last blocks, fewer prefix hits."),
  INT("num_kv_blocks", "blocks", 1, "KV blocks in the pool. Fewer: requests wait or are preempted. In vLLM: num_gpu_blocks_override."),
  {
    name: "gpu_memory_utilization", unit: "share of the GPU's memory", least: 0.01, most: 1, kind: "share",
    help: "Above 0, at most 1. Measures what weights, the largest step and recorded steps (CUDA graphs) take, and makes the pool of what is left of this share. Empty: num_kv_blocks as given.",
  },
  FLAG("enable_prefix_caching", "Share full blocks of equal prompt beginnings instead of computing them again."),
  FLAG("enable_chunked_prefill", "Split long prompts over several steps, so that others keep getting tokens in between."),
  INT("long_prefill_token_threshold", "tokens, 0 is off", 0, "Most prompt tokens of one request in a step while others exist."),
  CHOICE("scheduling_policy", ["fcfs", "priority"], "Who is served first and preempted last: by arrival, or by priority."),
  FLAG("async_scheduling", "Schedule the next step while the GPU computes this one, so that the GPU need not wait. The end of an answer is noticed a step later. Gains nothing on a CPU."),
  CHOICE("batching", ["continuous", "static"], "Static waits until the whole batch is done, and computes padding: the way before continuous batching."),
  CHOICE("kv_layout", ["paged", "contiguous"], "Contiguous gives each request one piece of memory: simple, with waste and holes."),
  CHOICE("reserve", ["max_model_len", "request"], "What a contiguous piece reserves: the longest possible, or this request's prompt + max_tokens."),
  FLAG("use_kv_cache", "Off: every step computes the whole sequence again."),
];
const BASE = {
  max_num_batched_tokens: 256, max_num_seqs: 8, max_model_len: 1024, block_size: 16, num_kv_blocks: 128, enable_prefix_caching: true,
  enable_chunked_prefill: true, long_prefill_token_threshold: 0, scheduling_policy: "fcfs", async_scheduling: false, batching: "continuous",
  kv_layout: "paged", reserve: "max_model_len", use_kv_cache: true, gpu_memory_utilization: null,
};
const WHOLE = { enable_chunked_prefill: false, enable_prefix_caching: false, max_num_batched_tokens: 1024 };
const PRESETS = {
  "the lab's default": {},
  "scarce memory": { num_kv_blocks: 24, max_model_len: 320 },
  "small token budget": { max_num_batched_tokens: 32 },
  "whole prompts": { enable_chunked_prefill: false, max_num_batched_tokens: 1024 },
  "static batching": { ...WHOLE, batching: "static", max_num_seqs: 4 },
  "contiguous memory": { kv_layout: "contiguous", enable_prefix_caching: false, max_model_len: 512 },
  "no KV cache": { ...WHOLE, use_kv_cache: false },
};

export function engineForm(view) {
  const inputs = {};
  const message = h("p", { class: "lab-message", role: "alert" });
  const done = h("p", { class: "lab-done", role: "status" });
  let running = null;
  const preset = h("select", { id: "lab-preset", onchange: () => choosePreset() }, h("option", { value: "" }, "choose …"), Object.keys(PRESETS).map((name) => h("option", {}, name)));
  const apply = h("button", { type: "submit", class: "lab-primary", id: "lab-apply" }, "Apply");
  const back = h("button", { type: "button", title: "Show the settings that run now", onclick: () => write(running) }, "Undo");
  const command = h("button", { type: "button", title: "Copy the matching vllm serve line", onclick: () => copy() }, "Copy as vLLM");

  const form = h(
    "form", { class: "lab-engineform", noValidate: true, onsubmit: (event) => { event.preventDefault(); send(); } },
    h("label", { class: "lab-knob", htmlFor: "lab-preset" }, h("span", {}, "preset"), preset),
    KNOBS.map((knob) => row(knob)),
    h("p", { class: "lab-note" }, "Apply restarts this lab's engine: requests end, weights stay loaded."),
    h("div", { class: "lab-sticky" }, message, done, h("div", { class: "lab-buttons" }, apply, back, command)),
  );
  const backend = h("p", { class: "lab-note lab-backend", hidden: true });
  form.prepend(backend);
  const node = h("details", { class: "lab-engine" }, h("summary", {}, "Engine"), form);

  function row(knob) {
    const id = "lab-knob-" + knob.name;
    const props = { id, name: knob.name, onchange: mark, oninput: mark, "aria-describedby": id + "-help" };
    const input =
      knob.kind === "int" ? h("input", { type: "number", min: knob.least, step: 1, ...props })
      : knob.kind === "share" ? h("input", { type: "number", min: knob.least, max: knob.most, step: 0.01, ...props })
      : knob.kind === "flag" ? h("input", { type: "checkbox", ...props })
      : h("select", props, knob.choices.map((c) => h("option", { value: c }, c)));
    inputs[knob.name] = input;
    return h("div", { class: "lab-knob lab-" + (knob.kind === "share" ? "int" : knob.kind) },
      h("label", { htmlFor: id }, h("code", {}, knob.name), knob.unit ? h("small", {}, knob.unit) : null), input,
      h("p", { id: id + "-help", class: "lab-help" }, knob.help + (knob.kind === "int" ? ` At least ${knob.least}.` : "")));
  }

  function read() {
    const found = {};
    for (const knob of KNOBS) {
      const input = inputs[knob.name];
      if (knob.kind === "int" || knob.kind === "share") found[knob.name] = input.value === "" ? input.validity.badInput ? "not a number" : null : Number(input.value);
      else found[knob.name] = knob.kind === "flag" ? input.checked : input.value;
    }
    return found;
  }

  function write(config) {
    if (!config) return;
    for (const knob of KNOBS) {
      if (knob.kind === "flag") inputs[knob.name].checked = Boolean(config[knob.name]);
      else inputs[knob.name].value = config[knob.name] ?? "";
    }
    setText(message, "");
    mark();
  }

  function mark() {
    if (!running) return;
    const now = read();
    let changed = false;
    for (const knob of KNOBS) {
      const differs = now[knob.name] !== running[knob.name];
      inputs[knob.name].closest(".lab-knob").classList.toggle("lab-changed", differs);
      changed ||= differs;
    }
    form.classList.toggle("lab-touched", changed);
  }

  function choosePreset() {
    if (preset.value) write({ ...BASE, ...PRESETS[preset.value] });
    preset.value = "";
  }

  async function send() {
    setText(message, "");
    setText(done, "");
    apply.disabled = true;
    try {
      const answer = await post("engine", { lab: view.lab, config: read() });
      running = answer.config;
      write(running);
      view.setLook({ selected: null, step: null });
      setText(done, "Applied. The engine started again; the weights stayed loaded.");
    } catch (error) {
      setText(message, error.message);
    } finally {
      apply.disabled = false;
    }
  }

  async function copy() {
    const answer = await fetch("/lab/api/vllm?" + new URLSearchParams({ lab: view.lab }));
    const found = await answer.json();
    try {
      await navigator.clipboard.writeText(found.command);
      setText(done, "Copied: " + found.command);
    } catch {
      setText(done, found.command);
    }
  }

  return {
    node,
    fill(head) {
      if (!head?.config) return;
      backend.hidden = !head.backend;
      if (head.backend) {
        setText(backend, `Computes with ${head.backend.words}.` + (head.backend.reason ? " " + head.backend.reason : ""));
        backend.title = head.backend.checks.join("\n");
      }
      inputs.gpu_memory_utilization.closest(".lab-knob").hidden = !head.model?.device.startsWith("cuda") && head.config.gpu_memory_utilization === null;
      const fresh = JSON.stringify(head.config) !== JSON.stringify(running);
      if (!fresh) return;
      const untouched = !form.classList.contains("lab-touched");
      running = head.config;
      if (untouched) write(running);
      else mark();
    },
  };
}
