// Draws the charts of a report: curves with intervals as SVG, a value of each curve at the pointer.
// The data are JSON in the page; nothing is loaded. All text is set as text, never as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2",
  "#7f7f7f", "#bcbd22", "#17becf"];
const DASHES = ["", "6 3", "2 2"];
const NUM_TICKS = 5;
// in pixels
const MIN_WIDTH = 240;
const MIN_HEIGHT = 220;
const MAX_HEIGHT = 400;

function make(parent, name, attributes = {}, text = null) {
  const isSvg = parent.namespaceURI === SVG || name === "svg";
  const node = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// 1234567 -> 1.23M; 0.01234 -> 0.0123
function short(value) {
  if (!isNumber(value)) return "-";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

// Round numbers between two bounds: 0, 0.2, 0.4, ...
function ticks(low, high) {
  const rough = (high - low) / NUM_TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    found.push(k * step);
  }
  return found;
}

// The place of the value that is nearest, in ascending values; -1 without one.
function nearest(values, wanted) {
  let best = -1;
  for (let i = 0; i < values.length; i += 1) {
    if (!isNumber(values[i])) continue;
    if (best < 0 || Math.abs(values[i] - wanted) < Math.abs(values[best] - wanted)) best = i;
  }
  return best;
}

function range(lists) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (!isNumber(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

class Chart {
  constructor(holder, data) {
    this.holder = holder;
    this.data = data;
    this.small = Boolean(data.small);
    this.key = `${document.title}/${data.id}`;
    this.hidden = new Set(this.stored("hidden", []));
    this.group = this.stored("group", data.groups[0].name);
    this.axis = this.stored("axis", data.axes[0].name);
    if (!data.groups.some((one) => one.name === this.group)) this.group = data.groups[0].name;
    if (!data.axes.some((one) => one.name === this.axis)) this.axis = data.axes[0].name;
    this.choose("group", data.groups.map((one) => one.name));
    this.choose("axis", data.axes.map((one) => one.name));
    this.margin = { left: 52, right: 12, top: 10, bottom: 44 };
    const label = `${data.title}, interactive curves`;
    this.svg = make(holder, "svg", { role: "img", "aria-label": label });
    this.tip = make(holder, "div", { class: "tip", hidden: "" });
    this.legend = make(holder, "div", { class: "legend" });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    window.addEventListener("resize", () => {
      if (this.width !== Math.max(this.holder.clientWidth, MIN_WIDTH)) this.draw();
    });
    this.draw();
  }

  // What was chosen is kept when the page is loaded again, where the browser allows it.
  stored(name, otherwise) {
    try {
      const text = sessionStorage.getItem(`${this.key}/${name}`);
      return text === null ? otherwise : JSON.parse(text);
    } catch (error) {
      return otherwise;
    }
  }

  store(name, value) {
    try {
      sessionStorage.setItem(`${this.key}/${name}`, JSON.stringify(value));
    } catch (error) {
      // private windows have no storage
    }
  }

  choose(what, names) {
    if (names.length < 2) return;
    const label = what === "group" ? "what is shown" : "x-axis";
    const select = make(this.holder, "select", { "aria-label": label });
    for (const name of names) make(select, "option", { value: name }, name);
    select.value = this[what];
    select.addEventListener("change", () => {
      this[what] = select.value;
      this.store(what, select.value);
      this.draw();
    });
  }

  axisOf() {
    return this.data.axes.find((one) => one.name === this.axis);
  }

  // A place on the x-axis as text.
  place(x) {
    const { labels, log } = this.axisOf();
    if (labels) return labels[x] ?? "";
    return short(log ? 10 ** x : x);
  }

  curves() {
    const group = this.data.groups.find((one) => one.name === this.group);
    const axis = this.axisOf();
    return group.curves.map((curve, place) => {
      const x = curve[axis.key];
      const color = curve.bold ? "#000000" : COLORS[place % COLORS.length];
      const dash = curve.bold ? "" : DASHES[Math.floor(place / COLORS.length) % DASHES.length];
      return { ...curve, x, color, dash, shown: !this.hidden.has(curve.name) && Array.isArray(x) };
    });
  }

  // One unit of the drawing is one pixel, so that texts have their size on every screen.
  resize() {
    this.width = Math.max(this.holder.clientWidth, MIN_WIDTH);
    const height = Math.min(Math.max(0.4 * this.width, MIN_HEIGHT), MAX_HEIGHT);
    this.height = this.small ? MIN_HEIGHT : height;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
  }

  draw() {
    this.resize();
    this.svg.replaceChildren();
    const group = this.data.groups.find((one) => one.name === this.group);
    const all = this.curves();
    const drawn = all.filter((curve) => curve.shown);
    const { labels } = this.axisOf();
    const xs = labels ? [-0.5, labels.length - 0.5] : range(drawn.map((curve) => curve.x));
    let ys = range(drawn.flatMap((curve) => [curve.y, curve.low || [], curve.high || []]));
    if (group.bounded) ys = [0, 1];
    const pad = (ys[1] - ys[0]) * 0.03;
    this.scale = this.scales(xs, [ys[0] - pad, ys[1] + pad]);
    this.axes(xs, ys, group);
    for (const curve of drawn) this.band(curve);
    for (const curve of drawn) this.curve(curve);
    this.cursor = make(this.svg, "line", { class: "cursor", visibility: "hidden" });
    this.legend.replaceChildren();
    for (const curve of this.data.legend === false ? [] : all) this.entry(curve);
  }

  scales(xs, ys) {
    const { left, right, top, bottom } = this.margin;
    const width = this.width - left - right;
    const height = this.height - top - bottom;
    return {
      x: (value) => left + ((value - xs[0]) / (xs[1] - xs[0])) * width,
      y: (value) => top + (1 - (value - ys[0]) / (ys[1] - ys[0])) * height,
      back: (place) => xs[0] + ((place - left) / width) * (xs[1] - xs[0]),
    };
  }

  axes(xs, ys, group) {
    const { left, right, top, bottom } = this.margin;
    const node = make(this.svg, "g", { class: "axis" });
    const base = this.height - bottom;
    for (const tick of ticks(...ys)) {
      const y = this.scale.y(tick);
      make(node, "line", { x1: left, x2: this.width - right, y1: y, y2: y });
      make(node, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, short(tick));
    }
    const { labels } = this.axisOf();
    for (const tick of labels ? labels.map((_, place) => place) : ticks(...xs)) {
      const x = this.scale.x(tick);
      make(node, "line", { x1: x, x2: x, y1: top, y2: base });
      make(node, "text", { x, y: base + 18, "text-anchor": "middle" }, this.place(tick));
    }
    const middle = (left + this.width - right) / 2;
    const below = { x: middle, y: this.height - 6, "text-anchor": "middle" };
    make(node, "text", below, this.small ? this.data.title : group.xlabel || this.axis);
  }

  // Pieces of a curve between values that are missing.
  pieces(curve, columns) {
    const found = [[]];
    curve.x.forEach((x, i) => {
      if (isNumber(x) && columns.every((column) => isNumber(column[i]))) {
        found[found.length - 1].push(i);
      } else {
        found.push([]);
      }
    });
    return found.filter((piece) => piece.length);
  }

  at(curve, column) {
    return (i) => `${this.scale.x(curve.x[i]).toFixed(1)},${this.scale.y(column[i]).toFixed(1)}`;
  }

  band(curve) {
    if (!curve.low || !curve.high) return;
    for (const piece of this.pieces(curve, [curve.low, curve.high])) {
      const there = piece.map(this.at(curve, curve.high));
      const back = piece.reverse().map(this.at(curve, curve.low));
      const points = [...there, ...back].join(" ");
      make(this.svg, "polygon", { class: "band", points, fill: curve.color });
    }
  }

  curve(curve) {
    const kind = curve.bold ? "curve bold" : "curve";
    const style = { class: kind, stroke: curve.color, "stroke-dasharray": curve.dash };
    if (curve.marks) {
      for (const point of this.pieces(curve, [curve.y]).flat().map(this.at(curve, curve.y))) {
        const [cx, cy] = point.split(",");
        make(this.svg, "circle", { cx, cy, r: this.small ? 3 : 4, fill: curve.color });
      }
      return;
    }
    for (const piece of this.pieces(curve, [curve.y])) {
      const points = piece.map(this.at(curve, curve.y)).join(" ");
      const line = make(this.svg, "polyline", { ...style, points });
      line.dataset.name = curve.name;
      if (piece.length === 1) {
        const [cx, cy] = points.split(",");
        make(this.svg, "circle", { cx, cy, r: 3, fill: curve.color });
      }
    }
  }

  entry(curve) {
    const button = make(this.legend, "button", { type: "button", "aria-pressed": curve.shown });
    const swatch = make(button, "span", { class: "swatch" });
    swatch.style.background = curve.color;
    make(button, "span", {}, curve.name);
    button.addEventListener("click", () => {
      if (this.hidden.has(curve.name)) this.hidden.delete(curve.name);
      else this.hidden.add(curve.name);
      this.store("hidden", [...this.hidden]);
      this.draw();
    });
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const wanted = this.scale.back(((event.clientX - box.left) / box.width) * this.width);
    const drawn = this.curves().filter((curve) => curve.shown && curve.x.length);
    if (!drawn.length) return;
    const values = drawn.map((curve) => curve.x[nearest(curve.x, wanted)]);
    const x = values[nearest(values, wanted)];
    if (!isNumber(x)) return;
    const place = this.scale.x(x);
    const ends = { x1: place, x2: place, y1: this.margin.top,
      y2: this.height - this.margin.bottom, visibility: "visible" };
    for (const [key, value] of Object.entries(ends)) this.cursor.setAttribute(key, value);
    this.tip.replaceChildren();
    make(this.tip, "div", { class: "faint" }, `${this.axis} ${this.place(x)}`);
    for (const curve of drawn) {
      const i = nearest(curve.x, x);
      const row = make(this.tip, "div");
      make(row, "span", { class: "swatch" }).style.background = curve.color;
      const hasBounds = curve.low && isNumber(curve.low[i]);
      const bounds = hasBounds ? ` [${short(curve.low[i])}, ${short(curve.high[i])}]` : "";
      make(row, "span", {}, `${curve.name} ${short(curve.y[i])}${bounds}`);
    }
    this.tip.hidden = false;
    const offset = event.clientX - box.left;
    const isRight = offset > box.width / 2;
    this.tip.style.top = `${box.top - this.holder.getBoundingClientRect().top + 8}px`;
    this.tip.style.left = isRight ? "" : `${offset + 14}px`;
    this.tip.style.right = isRight ? `${box.width - offset + 14}px` : "";
  }

  leave() {
    this.tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
  }
}

for (const holder of document.querySelectorAll(".chart")) {
  const data = JSON.parse(document.getElementById(`${holder.id}-data`).textContent);
  new Chart(holder, data);
}

// Served by `watch`, the page is loaded again when there is something new.
if (document.body.dataset.state) {
  const seconds = Number(document.body.dataset.seconds);
  setInterval(async () => {
    try {
      const answer = await fetch("state");
      if (!answer.ok) return;
      const { state } = await answer.json();
      if (state !== document.body.dataset.state) location.reload();
    } catch (error) {
      const box = document.getElementById("watched");
      box.textContent = "mtrl-lightning watch has ended";
      box.hidden = false;
    }
  }, seconds * 1000);
}
