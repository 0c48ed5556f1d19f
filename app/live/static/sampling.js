// The rest of the sampling settings. What is left empty keeps its default.
import { h, setText } from "./dom.js";

const NUMBERS = [
  ["n", "samples", "Answers to one prompt; they share its KV blocks until they differ."],
  ["top_k", "tokens", "Choose among the k likeliest tokens only."],
  ["top_p", "0 to 1", "Choose among the likeliest tokens that together reach this probability."],
  ["min_p", "0 to 1", "Drop tokens less likely than this times the likeliest."],
  ["repetition_penalty", "1 is off", "Above 1: tokens that occurred already become less likely."],
  ["presence_penalty", "-2 to 2", "Taken once from tokens that were generated already."],
  ["frequency_penalty", "-2 to 2", "Taken for each time that a token was generated already."],
  ["min_tokens", "tokens", "The answer does not end before this many tokens."],
  ["seed", "whole number", "The same seed and prompt give the same answer, whatever shares the batch."],
  ["priority", "smaller first", "Who is served first, with scheduling_policy priority."],
];

export function samplingForm() {
  const inputs = {};
  const field = (name, unit, help, input) => {
    inputs[name] = input;
    return h("label", { class: "lab-knob", htmlFor: input.id, title: help }, h("span", {}, name, h("small", {}, " " + unit)), input);
  };
  const number = ([name, unit, help]) =>
    field(name, unit, help, h("input", { id: "lab-sampling-" + name, type: "number", step: "any", placeholder: "default" }));
  const text = (name, unit, help) => field(name, unit, help, h("input", { id: "lab-sampling-" + name, type: "text", placeholder: "none" }));
  const node = h("details", { class: "lab-sampling" }, h("summary", {}, "Sampling"),
    h("div", { class: "lab-engineform" },
      NUMBERS.map(number),
      text("stop", "text", "The answer ends before this text, which is never shown."),
      text("cache_salt", "text", "Prefix-cache hits happen only between requests with the same salt."),
      field("ignore_eos", "go on after the end", "Generate all tokens even if the model wants to end.",
        h("input", { id: "lab-sampling-ignore_eos", type: "checkbox" }))));
  return {
    node,
    /** The settings that were filled in, or null after saying what is wrong. */
    read(message) {
      const found = {};
      for (const [name, input] of Object.entries(inputs)) {
        if (input.type === "checkbox") {
          if (input.checked) found[name] = true;
        } else if (input.validity.badInput || (input.type === "number" && input.value !== "" && !Number.isFinite(Number(input.value)))) {
          setText(message, `${name} must be a number.`);
          return null;
        } else if (input.value !== "") {
          found[name] = input.type === "number" ? Number(input.value) : input.value;
        }
      }
      return found;
    },
  };
}
