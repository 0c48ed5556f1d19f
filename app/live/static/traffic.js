// The traffic panel: how requests arrive, how long they are, when they stop. What is offered and what is achieved stand apart.
import { h, number, post, setText } from "./dom.js";

const PROCESSES = [
  ["poisson", "Poisson: at random"], ["constant", "constant: evenly"], ["bursty", "bursty: gamma gaps"], ["closed", "closed loop: users who wait"],
];
const DISTRIBUTIONS = [["fixed", "fixed"], ["uniform", "uniform"], ["lognormal", "log-normal"]];
const SLIDER = { seconds: [0.1, 100], steps: [0.01, 4] };

export function trafficPanel(view) {
  const inputs = {};
  const message = h("p", { class: "lab-message", role: "alert" });
  const report = h("div", { class: "lab-report", role: "status" });
  const summary = h("span", { class: "lab-count" });
  let brought = null;
  let touched = false;
  let timer = null;
  let running = false;

  const num = (name, label, value, props = {}) => {
    inputs[name] = h("input", { id: "lab-t-" + name, type: "number", value, oninput: () => touch(), ...props });
    return h("label", { htmlFor: "lab-t-" + name, title: props.title, "data-for": name }, label, inputs[name]);
  };
  const choice = (name, label, options, title, action = () => {}) => {
    inputs[name] = h("select", { id: "lab-t-" + name, onchange: () => { touch(); action(); shape(); } },
      options.map(([value, word]) => h("option", { value }, word)));
    return h("label", { htmlFor: "lab-t-" + name, title, "data-for": name }, label, inputs[name]);
  };
  const slider = h("input", {
    type: "range", min: 0, max: 1000, step: 1, id: "lab-t-slider", "aria-label": "Rate of arrivals", class: "lab-rate",
    oninput: () => { inputs.rate.value = nice(fromSlider(slider.value)); touch(); live(); },
  });
  const rateUnit = h("small", {});
  const rateRow = h("div", { class: "lab-wide", "data-for": "rate" }, num("rate", ["rate ", rateUnit], 1, { min: 0, step: "any", title: "Mean requests a second, or a step.", onchange: () => live() }), slider);
  const lengths = (name, title, tokens) => h(
    "fieldset", { "data-for": name }, h("legend", {}, title),
    h("div", { class: "lab-fields" },
      choice(name + "_distribution", "lengths", DISTRIBUTIONS, "How lengths are spread."),
      num(name + "_tokens", "tokens", tokens, { min: 1, step: 1, title: "The length, or the median of log-normal lengths." }),
      num(name + "_low", "from", 8, { min: 1, step: 1 }), num(name + "_high", "to", 256, { min: 1, step: 1 }),
      num(name + "_sigma", "spread σ", 0.5, { min: 0, step: 0.1, title: "Standard deviation of the logarithm." })));

  const start = h("button", { type: "submit", class: "lab-primary", id: "lab-t-start" }, "Start traffic");
  const stop = h("button", { type: "button", id: "lab-t-stop", onclick: () => command("stop") }, "Stop");
  const form = h(
    "form", { class: "lab-trafficform", noValidate: true, onsubmit: (event) => { event.preventDefault(); begin(); } },
    h("div", { class: "lab-fields" },
      choice("process", "arrivals", PROCESSES, "When requests come."),
      choice("unit", "timed in", [["seconds", "seconds"], ["steps", "steps"]], "In steps a run comes out the same on every machine.", () => units()),
      num("burstiness", "burstiness", 0.25, { min: 0.01, step: "any", title: "Shape of the gamma gaps: under 1 in bursts, 1 is Poisson." }),
      num("in_flight", "users", 4, { min: 1, step: 1, title: "Requests at once: users who each wait for their answer." }),
      num("think", "pause", 0, { min: 0, step: "any", title: "Between an answer and that user's next request." })),
    rateRow,
    lengths("prompt", "Prompts", 64), lengths("output", "Answers", 32),
    h("fieldset", { "data-for": "prefix" }, h("legend", {}, "Common prefix"),
      h("div", { class: "lab-fields" },
        num("prefix_tokens", "tokens", 0, { min: 0, step: 1, title: "First tokens of the prompt that requests share." }),
        num("prefix_share", "share, %", 100, { min: 0, max: 100, step: 1, title: "How many of the requests begin with it." }))),
    h("div", { class: "lab-fields" },
      num("stop_after", "stop after", 60, { min: 0, step: "any", title: "No more requests come after this many seconds or steps." }),
      num("seed", "seed", 0, { min: 0, step: 1, title: "The same seed gives the same arrivals, lengths and prompts." })),
    message, h("div", { class: "lab-buttons" }, start, stop), report,
    h("p", { class: "lab-note" }, "Latency counts from when a request was due, not from when the engine got to it."),
  );
  const node = h("details", { class: "lab-traffic" }, h("summary", {}, "Traffic", " ", summary), form);

  function touch() {
    touched = true;
    for (const marked of form.querySelectorAll(".lab-wrong")) marked.classList.remove("lab-wrong");
    slider.value = toSlider(Number(inputs.rate.value));
  }

  function units() {
    const steps = inputs.unit.value === "steps";
    inputs.rate.value = steps ? 0.1 : 1;
    inputs.stop_after.value = steps ? 200 : 60;
  }

  function shape() {
    const process = inputs.process.value;
    const show = (name, on) => { form.querySelector(`[data-for="${name}"]`).hidden = !on; };
    show("burstiness", process === "bursty");
    show("in_flight", process === "closed");
    show("think", process === "closed");
    show("rate", process !== "closed");
    rateRow.hidden = process === "closed";
    for (const name of ["prompt", "output"]) {
      const kind = inputs[name + "_distribution"].value;
      show(name + "_tokens", kind !== "uniform");
      show(name + "_low", kind !== "fixed");
      show(name + "_high", kind !== "fixed");
      show(name + "_sigma", kind === "lognormal");
    }
    setText(rateUnit, inputs.unit.value === "steps" ? "requests a step" : "requests a second");
    slider.value = toSlider(Number(inputs.rate.value));
  }

  const bounds = () => SLIDER[inputs.unit.value];
  const fromSlider = (at) => bounds()[0] * (bounds()[1] / bounds()[0]) ** (at / 1000);
  const toSlider = (rate) => Math.round((1000 * Math.log(Math.max(rate, 1e-9) / bounds()[0])) / Math.log(bounds()[1] / bounds()[0]));
  const nice = (value) => Number(value.toPrecision(2));

  function live() {
    if (!running) return;
    clearTimeout(timer);
    timer = setTimeout(() => command("rate", { rate: value("rate") }), 150);
  }

  function value(name) {
    const input = inputs[name];
    return input.value === "" ? (input.validity.badInput ? "not a number" : null) : Number(input.value);
  }

  function spec() {
    const process = inputs.process.value;
    const unit = inputs.unit.value;
    const arrivals = { process, unit };
    if (process === "closed") Object.assign(arrivals, { in_flight: value("in_flight"), think: value("think") });
    else arrivals.rate = value("rate");
    if (process === "bursty") arrivals.burstiness = value("burstiness");
    const spread = (name) => {
      const distribution = inputs[name + "_distribution"].value;
      const found = { distribution };
      if (distribution !== "uniform") found.tokens = value(name + "_tokens");
      if (distribution !== "fixed") Object.assign(found, { low: value(name + "_low"), high: value(name + "_high") });
      if (distribution === "lognormal") found.sigma = value(name + "_sigma");
      return found;
    };
    return {
      arrivals, prompt: spread("prompt"), output: spread("output"), seed: value("seed"),
      prefix: { tokens: value("prefix_tokens"), share: value("prefix_share") === null ? null : value("prefix_share") / 100 },
      stop: { [unit]: value("stop_after") },
    };
  }

  function write(workload) {
    const arrivals = workload.arrivals || {};
    inputs.process.value = arrivals.process || "poisson";
    inputs.unit.value = arrivals.unit || "seconds";
    const put = (name, found, otherwise) => { inputs[name].value = found ?? otherwise; };
    put("rate", arrivals.rate, 1);
    put("burstiness", arrivals.burstiness, 0.25);
    put("in_flight", arrivals.in_flight, 4);
    put("think", arrivals.think, 0);
    for (const [name, tokens] of [["prompt", 64], ["output", 32]]) {
      const found = workload[name] || {};
      put(name + "_distribution", found.distribution, "fixed");
      put(name + "_tokens", found.tokens, tokens);
      put(name + "_low", found.low, 1);
      put(name + "_high", found.high, 4096);
      put(name + "_sigma", found.sigma, 0.5);
    }
    put("prefix_tokens", workload.prefix?.tokens, 0);
    put("prefix_share", Math.round(100 * (workload.prefix?.share ?? 1)), 100);
    put("seed", workload.seed, 0);
    put("stop_after", workload.stop?.[inputs.unit.value], inputs.unit.value === "steps" ? 200 : 60);
    shape();
  }

  async function command(verb, body = {}) {
    setText(message, "");
    try {
      return await post(verb, { lab: view.lab, ...body });
    } catch (error) {
      setText(message, error.message);
      mark(error);
      return null;
    }
  }

  function mark(error) {
    const names = { tokens: "_tokens", low: "_low", high: "_high", sigma: "_sigma", distribution: "_distribution", share: "_share" };
    const about = /^([a-z_]+)(\.[a-z_]+)?[= ]/.exec(error.message.replace(/^.*?: (?=[a-z_]+=)/, ""));
    const field = error.field || "";
    const name = about ? about[1] : "";
    for (const wanted of [name, field + (names[name] || ""), field === "stop" ? "stop_after" : "", field]) {
      const found = wanted && form.querySelector(`[data-for="${wanted}"]`);
      if (found) {
        found.classList.add("lab-wrong");
        return;
      }
    }
  }

  async function begin() {
    const listed = brought && !touched ? brought : null;
    view.setLook({ step: null });
    const done = await command("traffic", { spec: listed || spec() });
    if (done) touched = false;
  }

  function rate(found, unit) {
    return found === null || found === undefined ? "n/a" : `${number(found, found < 1 ? 3 : 2)} /${unit === "steps" ? "step" : "s"}`;
  }

  shape();
  return {
    node,
    begin,
    fill(room) {
      const key = JSON.stringify(room.workload);
      if (room.workload && key !== JSON.stringify(brought)) {
        brought = room.workload;
        if (!brought.requests) {
          write(brought);
          touched = false;
        }
      }
      const now = room.traffic;
      running = Boolean(now && !now.ended);
      stop.disabled = !running;
      setText(start, running ? "Restart traffic" : "Start traffic");
      setText(summary, running ? `${rate(now.offered_rate, now.unit)} offered` : room.prepared ? "ready to start" : "");
      if (!now) {
        report.replaceChildren();
        return;
      }
      const notice = (view.sections.notices || []).filter((text) => text.startsWith("A request of the traffic")).at(-1);
      report.replaceChildren(
        h("dl", {},
          h("dt", { title: "Requests due in a second or a step." }, "offered"), h("dd", { class: "lab-offered" }, now.closed ? "as answered" : rate(now.offered_rate, now.unit)),
          h("dt", { title: "Requests completed in a second or a step." }, "achieved"), h("dd", { class: "lab-achieved" }, rate(now.achieved_rate, now.unit)),
          h("dt", {}, "due"), h("dd", {}, number(now.due)), h("dt", {}, "completed"), h("dd", {}, number(now.completed)),
          h("dt", {}, "in flight"), h("dd", {}, number(now.in_flight)),
          ...(now.failed ? [h("dt", {}, "failed"), h("dd", { class: "lab-failed" }, number(now.failed))] : [])),
        ...(now.failed && notice ? [h("p", { class: "lab-message" }, notice)] : []),
        h("p", { class: "lab-note" }, running ? "Requests are coming." : now.in_flight ? "No more requests come; those under way run on." : "The traffic has ended."));
    },
  };
}
