// Scenes: known stories, one click each. They are listed on a first visit, in the panel, and told beside the pictures.
import { h, setText } from "./dom.js";

export function scenes(view) {
  const list = h("ul", { class: "lab-scenelist" });
  const node = h("details", { class: "lab-scenes" }, h("summary", {}, "Scenes"), list);
  const cards = h("ul", { class: "lab-cards", "aria-label": "Scenes" });
  const title = h("strong", {});
  const look = h("span", { class: "lab-scenelook" });
  const again = h("button", { type: "button", onclick: () => current && start(current) }, "Run again");
  const banner = h("section", { class: "lab-scene", hidden: true, "aria-label": "Scene" }, title, look, again);
  let current = "";
  let known = [];
  let asked = false;

  async function start(id) {
    view.setLook({ selected: null, step: null });
    for (const button of list.querySelectorAll("button")) button.disabled = true;
    await view.command("scene", { id, rate: view.bar.rate() });
    for (const button of list.querySelectorAll("button")) button.disabled = false;
  }

  async function load() {
    if (asked) return;
    asked = true;
    try {
      const answer = await fetch("/lab/api/scenes");
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      show(found);
    } catch {
      asked = false;
    }
  }

  function show(found) {
    known = found.scenes;
    list.replaceChildren(
      ...known.map((scene) => h("li", {},
        h("button", { type: "button", class: "lab-scenebutton", "data-scene": scene.id, title: scene.look, onclick: () => start(scene.id) }, scene.title))),
      ...found.problems.map((text) => h("li", { class: "lab-message lab-problem" }, "Not listed: " + text)),
    );
    cards.replaceChildren(...known.slice(1, 7).map((scene) =>
      h("li", {}, h("button", { type: "button", "data-scene": scene.id, title: scene.look, onclick: () => start(scene.id) }, scene.title))));
    view.dirty.add("head");
    view.wake();
  }

  return {
    node, banner, cards, start, load,
    first: () => known[0],
    fill(room) {
      current = room.scene ? room.scene.id : "";
      banner.hidden = !room.scene;
      setText(title, room.scene ? room.scene.title : "");
      setText(look, room.scene ? room.scene.look : "");
      again.hidden = view.looksOn;
      for (const frame of view.root.querySelectorAll(".lab-marked")) frame.classList.remove("lab-marked");
      const frames = { batch: "batch", timelines: "timeline", pool: "pool", latency: "latency", requests: "list" };
      if (room.scene) view.root.querySelector(".lab-" + frames[room.scene.view])?.classList.add("lab-marked");
    },
  };
}
