// The Plotly pictures: drawn from figures that the server built, redrawn in place, never remounted.

const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false };

export class Charts {
  constructor(address, frames, probe, onPick, zoom = 1) {
    this.zoom = zoom;
    this.address = address;
    this.frames = frames;
    this.probe = probe;
    this.onPick = onPick;
    this.latest = {};
    this.busy = {};
    this.boxes = {}; // sizes as the browser reports them: to ask for them would lay the whole page out
    this.sizes = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        this.boxes[target.dataset.name] = contentRect;
        this.redraw(target.dataset.name);
      }
    });
    for (const [name, node] of Object.entries(frames)) {
      node.parentElement.dataset.name = name;
      this.sizes.observe(node.parentElement);
    }
  }

  /** Run plotly.js, which holds the page for half a second on a slow machine: once words and controls are there. */
  begin() {
    this.ready ??= load(this.address).then((plotly) => {
      this.plotly = plotly;
      for (const name of Object.keys(this.latest)) this.redraw(name);
    });
  }

  close() {
    this.sizes.disconnect();
    if (this.plotly) for (const node of Object.values(this.frames)) this.plotly.purge(node);
  }

  draw(name, picture) {
    this.latest[name] = picture;
    this.probe.figures[name] = picture.figure;
    this.frames[name].setAttribute("aria-label", picture.alt);
    this.redraw(name);
  }

  /** Frame one block of the pool; null: none. */
  mark(block) {
    if (this.marked === block) return;
    this.marked = block;
    this.redraw("pool");
  }

  /** The shape around the marked block, in the pool only. */
  frame(name, picture) {
    if (name !== "pool" || this.marked === undefined || this.marked === null) return {};
    const cell = Math.floor((this.marked - 1) / (picture.per_cell || 1));
    const [x, y] = [cell % picture.columns, Math.floor(cell / picture.columns)];
    const line = { color: picture.figure.layout.font.color, width: 3 };
    const shape = { type: "rect", name: "marked", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line };
    return { shapes: [...(picture.figure.layout.shapes || []), shape] };
  }

  async redraw(name) {
    const picture = this.latest[name];
    const node = this.frames[name];
    if (!this.plotly || !picture || this.busy[name]) {
      if (this.busy[name]) this.again = { ...this.again, [name]: true };
      return;
    }
    const box = this.boxes[name] || { width: 0, height: 0 };
    const [width, height] = [box.width / this.zoom, box.height / this.zoom];
    if (width < 20 || height < 20) return;
    if (this.zoom !== 1) Object.assign(node.style, { inset: "0 auto auto 0", width: width + "px", height: height + "px", transform: `scale(${this.zoom})`, transformOrigin: "0 0" });
    this.busy[name] = true;
    const begin = performance.now();
    try {
      const fresh = !node.data;
      const drawn = this.plotly.react(node, picture.figure.data, { ...picture.figure.layout, ...this.frame(name, picture), width, height, autosize: false }, fresh ? CONFIG : undefined);
      (this.probe.times ??= {})[name] = performance.now() - begin; // what follows waits for the other pictures too
      await drawn;
      if (fresh) this.listen(name, node);
    } finally {
      this.busy[name] = false;
    }
    if (this.again && this.again[name]) {
      this.again[name] = false;
      this.redraw(name);
    }
  }

  listen(name, node) {
    node.on("plotly_click", (event) => {
      const point = event.points[0];
      if (name === "batch") this.onPick({ step: point.x, request: point.customdata && point.customdata[2] ? point.customdata[2] : undefined });
      else if (name === "timeline") this.onPick({ step: point.x, request: this.latest.timeline.ids[point.y] });
      else if (name === "pool") this.onPick({ block: (Math.round(point.y) * this.latest.pool.columns + Math.round(point.x)) * (this.latest.pool.per_cell || 1) + 1 });
    });
  }
}

let loading = null;

function load(address) {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = address;
    script.onload = () => done(window.Plotly);
    script.onerror = () => fail(new Error("plotly.js could not be loaded from the lab's server"));
    document.head.append(script);
  });
  return loading;
}
