// The Plotly pictures: drawn from figures that the server built, redrawn in place, never remounted.

const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false };

export class Charts {
  constructor(address, frames, probe, onPick) {
    this.address = address;
    this.frames = frames;
    this.probe = probe;
    this.onPick = onPick;
    this.latest = {};
    this.busy = {};
    this.sizes = new ResizeObserver((entries) => {
      for (const entry of entries) this.redraw(entry.target.dataset.name);
    });
    for (const [name, node] of Object.entries(frames)) {
      node.dataset.name = name;
      this.sizes.observe(node);
    }
    this.ready = load(address).then((plotly) => {
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

  async redraw(name) {
    const picture = this.latest[name];
    const node = this.frames[name];
    if (!this.plotly || !picture || this.busy[name]) {
      if (this.busy[name]) this.again = { ...this.again, [name]: true };
      return;
    }
    const { width, height } = node.parentElement.getBoundingClientRect();
    if (width < 20 || height < 20) return;
    this.busy[name] = true;
    const begin = performance.now();
    try {
      const fresh = !node.data;
      await this.plotly.react(node, picture.figure.data, { ...picture.figure.layout, width, height, autosize: false }, CONFIG);
      if (fresh) this.listen(name, node);
    } finally {
      this.busy[name] = false;
    }
    (this.probe.times ??= {})[name] = performance.now() - begin;
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
      else if (name === "pool") this.onPick({ block: Math.round(point.y) * this.latest.pool.columns + Math.round(point.x) + 1 });
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
