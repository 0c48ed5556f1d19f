// The transport bar: drives the engine (run, pause, step) and this viewer's own cursor in time (slider, jumps, live).
import { h, setText } from "./dom.js";

const RATES = [["", "full speed"], ["20", "20 steps/s"], ["5", "5 steps/s"], ["2", "2 steps/s"], ["1", "1 step/s"], ["0.5", "1 step in 2 s"]];
const SPEEDS = [["2", "2 steps/s"], ["5", "5 steps/s"], ["10", "10 steps/s"], ["30", "30 steps/s"]];
const JUMPS = [["preempt", "preemption"], ["admit", "admission"], ["finish", "finish"], ["evict", "eviction"]];

export function transport(view) {
  const button = (text, title, action, extra = {}) => h("button", { type: "button", title, "aria-label": title, onclick: action, ...extra }, text);
  const run = button("Pause", "Pause or run the engine (space)", () => bar.toggle(), { class: "lab-run" });
  const one = button("Step", "Let the engine take one step (s)", () => bar.step(1), { class: "lab-step" });
  const ten = button("Step 10", "Let the engine take ten steps (S)", () => bar.step(10));
  const rate = h("select", { title: "Slow motion (r)", "aria-label": "Slow motion", onchange: () => bar.drive() },
    RATES.map(([value, word]) => h("option", { value }, word)));
  const first = button("|◀", "To the first step (Home)", () => view.goto(view.sections.clock?.first ?? 0));
  const back = button("◀", "One step back in time (left arrow)", () => view.goto(place() - 1));
  const ahead = button("▶", "One step on in time (right arrow)", () => view.goto(place() + 1));
  const play = button("Play", "Play the recorded steps from here (p)", () => bar.play(), { class: "lab-play" });
  const speed = h("select", { title: "Playback speed", "aria-label": "Playback speed", class: "lab-speed" },
    SPEEDS.map(([value, word]) => h("option", { value }, word)));
  const slider = h("input", {
    type: "range", title: "The step that the pictures show (g)", min: 0, max: 0, value: 0, class: "lab-slider", "aria-label": "Step that the pictures show",
    oninput: () => view.goto(Number(slider.value) >= Number(slider.max) ? null : Number(slider.value)),
  });
  const where = h("span", { class: "lab-where" });
  const live = button("LIVE", "Back to now (l)", () => view.goto(null), { class: "lab-live" });
  const jump = h("select", { title: "Jump to the next event of a kind", "aria-label": "Jump to the next", onchange: () => hop() },
    h("option", { value: "" }, "jump to …"),
    JUMPS.flatMap(([kind, word]) => [h("option", { value: "+" + kind }, "next " + word), h("option", { value: "-" + kind }, "previous " + word)]));
  let head = null;
  let timer = null;

  function stop() {
    clearTimeout(timer);
    timer = null;
    setText(play, "Play");
  }

  function advance() {
    const next = place() + 1;
    const last = view.sections.clock?.last ?? -1;
    if (next > last) {
      stop();
      if (head?.state !== "saved") view.goto(null);
      return;
    }
    view.goto(next, true);
    timer = setTimeout(advance, 1000 / Number(speed.value));
  }

  function place() {
    return view.look.step ?? view.sections.clock?.last ?? 0;
  }

  function hop(choice = jump.value) {
    jump.value = "";
    const steps = view.sections.clock?.jumps?.[choice.slice(1)] || [];
    const here = place();
    const found = choice[0] === "+" ? steps.find((s) => s > here) : steps.findLast((s) => s < here);
    if (found !== undefined) view.goto(found);
    else setText(view.message, `There is no ${choice[0] === "+" ? "later" : "earlier"} step of this kind.`);
  }

  const bar = {
    rate: () => Number(rate.value) || null,
    node: h("nav", { class: "lab-bar", "aria-label": "Transport" }, run, one, ten, rate,
      h("span", { class: "lab-gap" }), first, back, ahead, play, speed, slider, where, live, jump),
    toggle() {
      const running = head?.mode === "running";
      return view.command("control", { action: running ? "pause" : "run", rate: running ? null : Number(rate.value) || null });
    },
    play() {
      if (timer) return stop();
      const clock = view.sections.clock;
      if (!clock || clock.last < 0) return undefined;
      if (place() >= clock.last) view.goto(clock.first, true);
      setText(play, "Stop");
      timer = setTimeout(advance, 1000 / Number(speed.value));
      return undefined;
    },
    halt: () => timer && stop(),
    jump: (choice) => hop(choice),
    focusSlider: () => slider.focus(),
    slower() {
      rate.selectedIndex = (rate.selectedIndex + 1) % rate.options.length;
      setText(view.message, "");
      bar.drive();
    },
    step(steps) {
      view.setLook({ step: null });
      return view.command("control", { action: "step", steps });
    },
    drive() {
      if (head?.mode === "running") view.command("control", { action: "run", rate: Number(rate.value) || null });
    },
    render(clock, now, look) {
      head = now;
      const open = Boolean(now?.open);
      const saved = now?.state === "saved";
      for (const node of [run, one, ten, rate]) {
        node.disabled = !open;
        node.hidden = saved || view.follows;
      }
      live.hidden = saved;
      const running = now?.mode === "running";
      setText(run, running ? "Pause" : "Run");
      run.classList.toggle("lab-paused", open && !running);
      if (!clock) return;
      const empty = clock.last < 0;
      for (const node of [first, back, ahead, play, speed, slider, jump]) node.disabled = empty;
      slider.min = clock.first;
      slider.max = Math.max(clock.last, 0);
      if (document.activeElement !== slider || look.step === null) slider.value = look.step ?? clock.last;
      if (view.projector) {
        setText(where, empty ? "no step yet" : `step ${clock.cursor ?? clock.last} of ${clock.last}`);
        setText(live, clock.cursor === null ? "LIVE" : "LOOKING BACK");
        live.classList.toggle("lab-on", clock.cursor === null);
        return;
      }
      const gone = clock.first > 0 && !empty;
      setText(where, empty ? "no step yet" : `step ${look.step ?? clock.last} of ${gone ? `${clock.first}–` : ""}${clock.last}`);
      where.title = gone ? `Steps before ${clock.first} are gone: they are older than what the lab keeps.` : "";
      live.classList.toggle("lab-on", look.step === null);
      live.setAttribute("aria-pressed", String(look.step === null));
    },
  };
  return bar;
}
