"use strict";
// Drawing for all pages: elements, numbers, axes and frames. Text reaches the page through textContent only.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = document.querySelector("svg")?.namespaceURI;
const $ = (id) => document.getElementById(id);

function add(parent, tag, attributes = {}, text) {
  const node = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

function short(x, digits = 4) {
  if (x === null || x === undefined) return "–";
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6)) return x.toExponential(Math.max(0, digits - 2)).replace(/\.?0*e/, "e");
  return String(Number(x.toPrecision(digits)));
}

// Ends and ticks of an axis that holds `values`; on a log axis only the positive ones count.
function axis(values, { log = false, count = 4, tight = false } = {}) {
  const good = values.filter((v) => v !== null && (!log || v > 0));
  if (!good.length) return { lo: log ? 0.1 : 0, hi: 1, ticks: log ? [0.1, 1] : [0, 1], log };
  let lo = good.reduce((a, b) => Math.min(a, b)), hi = good.reduce((a, b) => Math.max(a, b));
  if (log) {
    if (!tight) [lo, hi] = hi / lo < 1 + 1e-6 ? [lo / 1.5, hi * 1.5] : [lo / (hi / lo) ** 0.05, hi * (hi / lo) ** 0.05];
    const decades = Math.log10(hi / lo), every = Math.max(1, Math.ceil(decades / count)), ticks = [];
    for (let e = Math.floor(Math.log10(lo)); e <= Math.log10(hi); e++)
      for (const m of decades < 0.7 ? [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8] : decades < 2 ? [1, 2, 5] : [1])
        if (m > 1 || e % every === 0) ticks.push(m * 10 ** e);
    return { lo, hi, ticks: ticks.filter((t) => t >= lo * 0.999 && t <= hi * 1.001), log };
  }
  if (lo >= 0 && lo < hi * 0.5 && !tight) lo = 0;
  if (lo === 0 && hi === 0) hi = 1;
  else if (hi - lo <= 1e-6 * Math.max(Math.abs(lo), Math.abs(hi))) [lo, hi] = [lo - (Math.abs(lo) || 1) * 0.5, hi + (Math.abs(hi) || 1) * 0.5];
  const raw = (hi - lo) / count, power = 10 ** Math.floor(Math.log10(raw)), size = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  if (!tight) { const pad = (hi - lo) * 0.05; hi += pad; if (lo !== 0) lo -= pad; }
  const ticks = [];
  for (let i = Math.ceil(lo / size - 1e-9); i * size <= hi + size * 1e-9; i++) ticks.push(i * size);
  return { lo, hi, ticks, log };
}

// The fewest digits that keep the labels of an axis distinct, at least three.
function tickDigits(ticks) {
  let digits = 3;
  while (digits < 12 && new Set(ticks.map((t) => short(t, digits))).size < ticks.length) digits++;
  return digits;
}

// The frame of a chart: grid, tick labels, and the scales x and y from values to pixels.
function frame(svg, xAxis, yAxis, height) {
  const width = Math.max(200, svg.clientWidth), box = { left: 46, right: width - 10, top: 8, bottom: height - 22 };
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const part = ({ lo, hi, log }, v) => (log ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo));
  const x = (v) => box.left + part(xAxis, v) * (box.right - box.left), y = (v) => box.bottom - part(yAxis, v) * (box.bottom - box.top);
  const digits = tickDigits(yAxis.ticks);
  for (const t of yAxis.ticks) {
    add(svg, "line", { class: "rule", x1: box.left, x2: box.right, y1: y(t), y2: y(t) });
    add(svg, "text", { class: "tick end", x: box.left - 6, y: y(t) + 4 }, short(t, digits));
  }
  for (const t of xAxis.ticks) add(svg, "text", { class: "tick", x: x(t), y: height - 6 }, xAxis.label ? xAxis.label(t) : short(t, 6));
  if (xAxis.unit) add(svg, "text", { class: "unit", x: 0, y: height - 6 }, xAxis.unit);
  const value = (pixel) => {
    const share = (pixel - box.left) / (box.right - box.left);
    return xAxis.log ? xAxis.lo * (xAxis.hi / xAxis.lo) ** share : xAxis.lo + share * (xAxis.hi - xAxis.lo);
  };
  return { x, y, value, box, width };
}
