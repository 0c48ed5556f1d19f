// Small helpers: build elements without ever parsing text as HTML, talk to the lab's routes.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export async function post(verb, body) {
  let answer;
  try {
    answer = await fetch("/lab/api/" + verb, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
  } catch {
    throw new Error("the lab's server does not answer: is it still running?");
  }
  let found = {};
  try {
    found = await answer.json();
  } catch {
    /* an answer without a body: the status speaks */
  }
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

export const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "n/a"
    : value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: 0 });

export const milliseconds = (value) =>
  value === null || value === undefined ? "n/a" : value >= 10000 ? number(value / 1000, 1) + " s" : number(value, value < 10 ? 1 : 0);
