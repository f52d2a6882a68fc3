"use strict";
// Charts: lines over steps, all on one step axis, with one crosshair. Text reaches the page through textContent only.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = document.querySelector("svg")?.namespaceURI;
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "1 5", "14 4"];
const state = { run: 0, step: null, sample: 0, token: 0, color: "ratio", smooth: 0, theme: "system", log: new Set(), hidden: new Set(), keys: new Set() };
const charts = []; // {figure, draw}; after drawing also x (step → pixel) and line (the crosshair)
const $ = (id) => document.getElementById(id);
const visibleRuns = () => DATA.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));

function add(parent, tag, attributes = {}, text) {
  const node = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

const brief = (key) => key.replace(/^(policy|timing)\//, "");

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
      for (const m of decades < 0.7 ? [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8] : decades < 1.5 ? [1, 2, 5] : [1])
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

// The frame of a chart: grid, tick labels, and the scales x and y from values to pixels.
function frame(svg, xAxis, yAxis, height) {
  const width = Math.max(200, svg.clientWidth), box = { left: 46, right: width - 10, top: 8, bottom: height - 22 };
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const part = ({ lo, hi, log }, v) => (log ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo));
  const x = (v) => box.left + part(xAxis, v) * (box.right - box.left), y = (v) => box.bottom - part(yAxis, v) * (box.bottom - box.top);
  for (const t of yAxis.ticks) {
    add(svg, "line", { class: "rule", x1: box.left, x2: box.right, y1: y(t), y2: y(t) });
    add(svg, "text", { class: "tick end", x: box.left - 6, y: y(t) + 4 }, short(t, 3));
  }
  for (const t of xAxis.ticks) add(svg, "text", { class: "tick", x: x(t), y: height - 6 }, short(t, 6));
  return { x, y, box, width };
}

function stepAxis(width) {
  const all = DATA.runs.flatMap((run) => run.steps.flatMap((steps) => [steps[0], steps[steps.length - 1]]));
  const found = axis(all, { tight: true, count: Math.max(2, Math.floor(width / 65)) });
  return { ...found, ticks: found.ticks.filter(Number.isInteger) };
}

// Exponential moving average without the pull to its start; gaps stay gaps.
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((v) => (v === null ? null : ((sum = weight * sum + (1 - weight) * v), (mass = weight * mass + 1 - weight), sum / mass)));
}

function linesOf(panel) {
  return visibleRuns().flatMap(({ run, index }) => panel.keys.flatMap((key, k) => {
    if (!run.series[key] || state.keys.has(key)) return [];
    const [which, values] = run.series[key], sparse = key.startsWith("eval/");
    return [{ run, index, key, k, steps: run.steps[which], values, sparse, shown: state.smooth && !sparse ? smoothed(values, state.smooth) : values }];
  }));
}

function drawLine(svg, { x, y, box }, line, log, values, kind) {
  const style = { class: `line run${line.index % 8} ${kind}`, "stroke-dasharray": DASHES[line.k % DASHES.length] };
  const fits = (v) => v !== null && v !== undefined && (!log || v > 0);
  let path = "";
  values.forEach((v, i) => {
    if (!fits(v)) {
      if (v === null && kind !== "raw") add(svg, "text", { class: `lost run${line.index % 8}`, x: x(line.steps[i]), y: box.top + 9 }, "×");
      return;
    }
    path += `${fits(values[i - 1]) ? "L" : "M"}${x(line.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    const alone = !fits(values[i - 1]) && !fits(values[i + 1]);
    if (kind !== "raw" && (alone || (line.sparse && values.length < 80))) add(svg, "circle", { class: `dot run${line.index % 8}`, cx: x(line.steps[i]), cy: y(v), r: 3 });
  });
  add(svg, "path", { ...style, d: path });
}

function drawPanel(chart) {
  const { figure, panel } = chart, svg = figure.querySelector("svg"), lines = linesOf(panel);
  const values = lines.flatMap((line) => (state.smooth ? line.shown.concat(line.values) : line.values));
  const log = state.log.has(panel.id) && values.some((v) => v > 0);
  const yAxis = panel.share && !log ? { lo: 0, hi: 1, ticks: [0, 0.25, 0.5, 0.75, 1] } : axis(values, { log });
  const scales = frame(svg, stepAxis(svg.clientWidth), yAxis, 210);
  if (state.smooth) for (const line of lines) if (!line.sparse) drawLine(svg, scales, line, log, line.values, "raw");
  for (const line of lines) drawLine(svg, scales, line, log, line.shown, "");
  if (!values.some((v) => v !== null)) add(svg, "text", { class: "tick", x: scales.width / 2, y: 100 }, lines.length ? "no finite value" : "nothing to show");
  if (log && values.some((v) => v !== null && v <= 0)) add(svg, "text", { class: "tick end", x: scales.box.right, y: scales.box.top + 10 }, "0 and below are not on a log scale");
  Object.assign(chart, scales, { lines, line: add(svg, "line", { class: "cross", y1: scales.box.top, y2: scales.box.bottom, visibility: "hidden" }) });
  figure.querySelector(".log").setAttribute("aria-pressed", log);
}

// The crosshair on every chart, and the values at that step beside the one that is pointed at.
function point(chart, step, clientX, clientY) {
  for (const other of charts) {
    if (!other.line) continue;
    other.line.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) other.line.setAttribute(end, other.x(step));
  }
  const tip = $("tip");
  tip.hidden = step === null || !chart.lines;
  if (tip.hidden) return;
  tip.replaceChildren();
  add(tip, "b", {}, `step ${step}`);
  for (const line of chart.lines) {
    const at = line.steps.indexOf(step);
    if (at < 0) continue;
    const row = add(tip, "div");
    add(row, "i", { class: `swatch run${line.index % 8}` });
    add(row, "span", {}, chart.panel.keys.length > 1 ? `${line.run.label} · ${brief(line.key)}` : line.run.label);
    if (line.run.names[line.key]) add(row, "small", {}, line.run.names[line.key]);
    add(row, "b", {}, line.values[at] === null ? "NaN or ∞" : short(line.shown[at]));
  }
  tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

function listen(chart) {
  const svg = chart.figure.querySelector("svg");
  const steps = () => [...new Set(chart.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const nearest = (event) => steps().reduce((best, s) => {
    const distance = Math.abs(chart.x(s) - (event.clientX - svg.getBoundingClientRect().left));
    return best === null || distance < best[1] ? [s, distance] : best;
  }, null)?.[0] ?? null;
  svg.addEventListener("pointermove", (event) => { chart.at = nearest(event); point(chart, chart.at, event.clientX, event.clientY); });
  svg.addEventListener("pointerleave", () => point(chart, null));
  svg.addEventListener("blur", () => point(chart, null));
  svg.addEventListener("click", (event) => selectStep(nearest(event)));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], all = steps();
    if (event.key === "Enter" && chart.at !== undefined) selectStep(chart.at);
    if (!move || !all.length) return;
    event.preventDefault();
    chart.at = all[Math.max(0, Math.min(all.length - 1, all.indexOf(chart.at) + move))];
    const where = svg.getBoundingClientRect();
    point(chart, chart.at, where.left + chart.x(chart.at), where.top + 20);
  });
}
