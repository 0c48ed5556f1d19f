// The lab as a link, the projector's view, the link for followers; and for the machine's owner: the model.
import { h, number, post, setText } from "./dom.js";

const DTYPES = ["auto", "float32", "bfloat16", "float16"];

export function sharePanel(view) {
  const message = h("p", { class: "lab-message", role: "alert" });
  const done = h("p", { class: "lab-done", role: "status" });
  const copied = h("input", { type: "text", readOnly: true, class: "lab-address", "aria-label": "Link to a lab like this one", hidden: true });
  const follow = h("div", { class: "lab-follow" });
  const node = h("details", { class: "lab-share" }, h("summary", {}, "Share"),
    h("div", { class: "lab-shareform" },
      h("div", { class: "lab-buttons" },
        h("button", { type: "button", id: "lab-copy", title: "Settings, traffic and view; not your lab itself", onclick: () => copy() }, "Copy link"),
        h("button", { type: "button", id: "lab-projector", onclick: () => window.open(projector(), "_blank", "noopener") }, "Projector view"),
        h("button", { type: "button", id: "lab-follow", onclick: () => share() }, "Follow link")),
      h("p", { class: "lab-note" }, "Copy link: opens a lab with these settings and this traffic. Projector view: this lab, large and dark, in a page of its own. Follow link: others look at this lab, each at their own step, and can't change it."),
      message, done, copied, follow));

  function projector() {
    return "/?" + new URLSearchParams({ lab: view.lab, view: "projector" });
  }

  async function copy() {
    const link = location.origin + "/?" + view.linkQuery();
    copied.value = link;
    copied.hidden = false;
    try {
      await navigator.clipboard.writeText(link);
      setText(done, "Copied. Your lab's own address stays private.");
    } catch {
      setText(done, "Copy this address:");
      copied.select();
    }
  }

  async function share(address = "") {
    setText(message, "");
    try {
      const found = await post("share", { lab: view.lab, origin: location.origin, address });
      const place = h("select", { "aria-label": "Address of this machine", onchange: () => share(place.value) },
        found.addresses.map((text) => h("option", { value: text, selected: found.address.includes(text) }, text)));
      follow.replaceChildren(
        h("img", { src: found.qr, alt: "QR code of the follow link", class: "lab-qr" }),
        h("input", { type: "text", readOnly: true, value: found.address, class: "lab-address", "aria-label": "Follow link", onclick: (e) => e.target.select() }),
        found.addresses.length > 1 ? place : "",
        h("p", { class: "lab-note" }, found.open ? found.words
          : "This lab listens on this machine only, so the link works here alone. To let a class in, start it with make lab HOST=0.0.0.0; it then says what that opens."),
        h("button", { type: "button", onclick: () => end() }, "Stop sharing"));
    } catch (error) {
      setText(message, error.message);
    }
  }

  async function end() {
    await view.command("share", { on: false }, message);
    follow.replaceChildren(h("p", { class: "lab-note" }, "Nobody follows any more. The next follow link is a new one."));
  }

  return { node };
}

export function modelPanel(view) {
  const message = h("p", { class: "lab-message", role: "alert" });
  const name = h("input", { id: "lab-model-name", type: "text", value: "smollm2", list: "lab-models", spellcheck: false });
  const device = h("input", { id: "lab-model-device", type: "text", value: "auto" });
  const dtype = h("select", { id: "lab-model-dtype" }, DTYPES.map((d) => h("option", { value: d }, d)));
  const load = h("button", { type: "submit", class: "lab-primary", id: "lab-model-load" }, "Load for everyone");
  const names = h("datalist", { id: "lab-models" }, h("option", { value: "smollm2" }), h("option", { value: "tiny" }));
  const form = h("form", { class: "lab-trafficform", noValidate: true, onsubmit: (event) => { event.preventDefault(); send(); } },
    h("label", { htmlFor: "lab-model-name", title: "smollm2, tiny, a folder on this machine, or a hub name" }, "model", name), names,
    h("div", { class: "lab-fields" }, h("label", { htmlFor: "lab-model-device" }, "device", device), h("label", { htmlFor: "lab-model-dtype" }, "dtype", dtype)),
    h("p", { class: "lab-note" }, "smollm2 and tiny need no network; a folder is read from this machine; a hub name is downloaded from the hub. All labs of this machine change: requests end, settings stay, and others are told."),
    message, load);
  const node = h("details", { class: "lab-modelpanel" }, h("summary", {}, "Model"), form);

  async function send() {
    load.disabled = true;
    await view.command("model", { model: name.value, device: device.value.trim() || "auto", dtype: dtype.value }, message);
    load.disabled = false;
  }

  return { node };
}

// What this lab shares with the others on the machine, and what happened to it from outside.
export function roomNotes(view) {
  const waits = h("p", { class: "lab-note lab-waits" });
  const notice = h("p", { class: "lab-notice", role: "status", hidden: true });
  let dismissed = "";
  const close = h("button", { type: "button", "aria-label": "Close this note", onclick: () => { dismissed = notice.dataset.text; notice.hidden = true; } }, "Close");
  const text = h("span", {});
  notice.append(text, close);
  return {
    waits, notice,
    fill(room) {
      const share = 100 * room.waited;
      setText(waits, (room.waited < 0.005 ? "" : `This lab waited for other labs ${number(share, share < 10 ? 1 : 0)} % of the time of its newest steps. `)
        + "This lab's prompts, settings and prefix cache are its own: no other session sees or shares them."
        + (room.followers ? ` ${room.followers} ${room.followers === 1 ? "page follows" : "pages follow"} it.` : ""));
      const said = [...(room.problems || []), room.notice].filter(Boolean).join(" ");
      notice.dataset.text = said;
      setText(text, said);
      notice.hidden = !said || said === dismissed;
    },
  };
}
