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

/** Put ``nodes`` into ``container`` in this order, and nothing else; what stands right is not touched. */
export function arrange(container, nodes) {
  nodes.forEach((node, i) => {
    if (container.children[i] !== node) container.insertBefore(node, container.children[i] || null);
  });
  while (container.children.length > nodes.length) container.lastChild.remove();
}

/** A count in little room: 12,345 is 12k. */
export const brief = (value) => (value >= 9999.5 ? number(value / 1000) + "k" : number(value));

const FORMATS = [0, 1, 2, 3].map((digits) => new Intl.NumberFormat("en-US", { maximumFractionDigits: digits })); // slow to make

export const number = (value, digits = 0) => (value === null || value === undefined ? "n/a" : FORMATS[digits].format(value));

export const milliseconds = (value) =>
  value === null || value === undefined ? "n/a" : value >= 9999.5 ? number(value / 1000, 1) + " s" : number(value, value < 10 ? 1 : 0);
