// The charts of lines: drawing, the crosshair that they share, reading by pointer and keyboard, zoom.
const HEIGHT = 210, CLOSE = 24, LISTED = 12, CROWD = 6; // pixels; pixels around a line; rows of a tip; runs
let hovered = null; // the run that is pointed at

const isCrowded = (lines) => new Set(lines.map((line) => line.index)).size > CROWD;
const fits = (v, log) => v !== null && v !== undefined && (!log || v > 0);

// The points of a line to draw: all, or, where several share a column of pixels, the first, the lowest, the highest and the
// last of them, and every gap.
function drawnPoints(line, values, { x, box }, log) {
  if (values.length < 2 * (box.right - box.left)) return values.map((_, i) => i);
  const kept = new Set(), inside = (i) => fits(values[i], log);
  for (let i = 0, j; i < values.length; i = j) {
    const column = Math.round(x(line.xs[i]));
    let low = i, high = i;
    for (j = i; j < values.length && Math.round(x(line.xs[j])) === column; j++) {
      if (!inside(j)) kept.add(j);
      else if (!inside(low)) low = high = j;
      else if (values[j] < values[low]) low = j;
      else if (values[j] > values[high]) high = j;
    }
    for (const one of [i, low, high, j - 1]) kept.add(one);
  }
  return [...kept].sort((a, b) => a - b);
}

function drawLine(plot, scales, line, log, values, kind) {
  const { x, y, box } = scales, colour = `run${line.index % 8}`, places = drawnPoints(line, values, scales, log);
  let path = "";
  places.forEach((i, at) => {
    const v = values[i];
    if (!fits(v, log)) {
      if (v === null && kind !== "raw") add(plot, "text", { class: `lost ${colour}`, x: x(line.xs[i]), y: box.top + 9 }, "×");
      return;
    }
    const joined = at && fits(values[places[at - 1]], log), alone = !joined && !fits(values[places[at + 1]], log);
    path += `${joined ? "L" : "M"}${x(line.xs[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    if (kind !== "raw" && (alone || (line.sparse && !line.low && values.length < 80 && !kind))) add(plot, "circle", { class: `dot ${colour}`, cx: x(line.xs[i]), cy: y(v), r: 3 });
  });
  add(plot, "path", { class: `line ${colour} ${kind}`, "stroke-dasharray": DASHES[line.k % DASHES.length], d: path });
}

// The range of a band, as an area for every stretch without a gap.
function drawRange(plot, { x, y }, line, log) {
  let stretch = [];
  const finish = () => {
    if (stretch.length) add(plot, "path", { class: `range run${line.index % 8}`, d: `M${stretch.map(([i]) => `${x(line.xs[i]).toFixed(1)} ${y(line.high[i]).toFixed(1)}`).join("L")}L${stretch.reverse().map(([i]) => `${x(line.xs[i]).toFixed(1)} ${y(line.low[i]).toFixed(1)}`).join("L")}Z` });
    stretch = [];
  };
  line.xs.forEach((_, i) => (fits(line.low[i], log) && fits(line.high[i], log) ? stretch.push([i]) : finish()));
  finish();
}

// Dots in the colours of all runs with coinciding lines, in turns along the line.
function drawTurns(plot, { x, y, box }, same, log) {
  const [line] = same, every = Math.max(44, 8 * same.length), xs = line.xs.map(x);
  same.forEach((one, j) => {
    for (let at = box.left + ((j + 0.5) * every) / same.length; at < box.right; at += every) {
      const v = valueAt(xs, line.shown, at);
      if (fits(v, log)) add(plot, "circle", { class: `turn run${one.index % 8}`, cx: at, cy: y(v), r: 3.4 });
    }
  });
}

function drawPanel(chart) {
  const { figure, panel } = chart, svg = figure.querySelector("svg"), lines = linesOf(panel), compared = baseSubject();
  const values = [];
  for (const line of lines) line.xs.forEach((x, i) => {
    if (inZoom(x)) for (const ys of [line.shown, state.smooth ? line.values : null, line.low, line.high]) if (ys && ys[i] !== null && ys[i] !== undefined) values.push(ys[i]);
  });
  const log = !compared && state.log.has(panel.id) && values.some((v) => v > 0), many = isCrowded(lines);
  const whole = panel.share && !log && !compared && !state.zoom;
  const yAxis = whole ? { lo: 0, hi: 1, ticks: [0, 0.25, 0.5, 0.75, 1] } : axis(compared ? values.concat(0) : values, { log });
  const scales = frame(svg, sharedAxis(svg.clientWidth), yAxis, HEIGHT), { box, y } = scales;
  // A nested picture clips everything outside the zoom.
  const plot = add(svg, "svg", { class: "plot", x: box.left - 4, y: 0, width: box.right - box.left + 8, height: box.bottom + 4, viewBox: `${box.left - 4} 0 ${box.right - box.left + 8} ${box.bottom + 4}` });
  if (compared) add(plot, "line", { class: "zero", x1: box.left, x2: box.right, y1: y(0), y2: y(0) });
  for (const line of lines) {
    line.node = add(plot, "g");
    if (line.low) drawRange(line.node, scales, line, log);
    if (state.smooth && !line.sparse && !line.low && !many) drawLine(line.node, scales, line, log, line.values, "raw");
    drawLine(line.node, scales, line, log, line.shown, many ? "thin" : "");
  }
  const same = coincidingLines(lines);
  for (const together of same) drawTurns(plot, scales, together, log);
  if (!values.length) add(svg, "text", { class: "tick", x: scales.width / 2, y: 100 }, lines.length ? "no finite value" : state.x !== "step" ? `the runs logged no ${UNITS[state.x].over}` : "nothing to show");
  Object.assign(chart, scales, { lines, unit: state.x, line: add(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" }) });
  figure.querySelector(".log").setAttribute("aria-pressed", log);
  figure.querySelector(".log").disabled = Boolean(compared);
  const below = log && values.some((v) => v <= 0) ? "0 and below are not on a log scale." : "";
  figure.querySelector(".same").textContent = [below, sameText(panel, same)].filter(Boolean).join(" ");
  svg.setAttribute("aria-label", gist(panel, lines));
  drawNumbers(chart);
  emphasise();
}

function listNames(names) {
  const shown = names.length > 6 ? [...names.slice(0, 5), `${names.length - 5} more`] : names;
  return [shown.slice(0, -1).join(", "), shown[shown.length - 1]].filter(Boolean).join(" and ");
}

function sameText(panel, same) {
  const texts = new Map(), keys = panel.keys.filter((key) => !state.keys.has(key)).length;
  for (const lines of same) {
    const names = listNames(lines.map((line) => line.name));
    texts.set(names, [...(texts.get(names) ?? []), brief(lines[0].key)]);
  }
  return [...texts].map(([names, inside]) => `${names} coincide${inside.length < keys ? ` in ${inside.join(", ")}` : ""}.`).join(" ");
}

// Lines of the runs that are highlighted stay strong; the others fade.
function emphasise() {
  const chosen = hovered === null ? state.marked : new Set([hovered, ...state.marked]);
  for (const { lines } of charts) for (const line of lines ?? []) {
    const strong = line.runs.some((i) => chosen.has(i));
    line.node.setAttribute("class", chosen.size ? (strong ? "strong" : "faded") : "");
  }
}

function hover(index) {
  if (hovered === index) return;
  hovered = index;
  emphasise();
}

// The crosshair on every chart, and the values there next to the chart under the pointer.
function point(chart, at, clientX, clientY) {
  for (const other of charts) {
    if (!other.line) continue;
    const inside = at !== null && (other.unit ?? "step") === chart.unit && other.x(at) >= other.box.left - 1 && other.x(at) <= other.box.right + 1;
    other.line.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) for (const end of ["x1", "x2"]) other.line.setAttribute(end, other.x(at));
  }
  const tip = $("tip");
  tip.hidden = at === null || !chart.lines;
  if (tip.hidden) return hover(null);
  const top = chart.figure.querySelector("svg").getBoundingClientRect().top;
  const rows = chart.lines.flatMap((line) => {
    const i = line.xs.indexOf(at), exact = i >= 0, v = exact ? line.shown[i] : line.sparse ? undefined : valueAt(line.xs, line.shown, at);
    if (v === undefined || (!exact && v === null)) return [];
    return [{ line, i, exact, v, distance: v === null ? Infinity : Math.abs(chart.y(v) - (clientY - top)) }];
  });
  const nearest = rows.reduce((best, row) => (row.distance < (best?.distance ?? CLOSE) ? row : best), null);
  const many = isCrowded(chart.lines);
  hover(many ? nearest?.line.runs[0] ?? null : null);
  const shown = rows.length > LISTED ? [...rows].sort((a, b) => a.distance - b.distance).slice(0, LISTED) : rows;
  tip.replaceChildren();
  add(tip, "b", {}, UNITS[chart.unit].label(at));
  for (const { line, i, exact, v } of shown) {
    const row = add(tip, "div", { class: line === nearest?.line && many ? "nearest" : "" });
    add(row, "i", { class: `swatch run${line.index % 8}` });
    add(row, "span", {}, chart.panel.keys.length > 1 ? `${line.name} · ${brief(line.key)}` : line.name);
    const original = DATA.runs[line.index].names[line.key]; // in the files of another trainer
    if (original) add(row, "span", { class: "quiet" }, ` (${original})`);
    const range = line.low && exact ? ` (${short(line.low[i], 3)} to ${short(line.high[i], 3)}${line.count[i] < line.size ? `, ${line.count[i]} of ${line.size}` : ""})` : "";
    add(row, "b", {}, v === null ? "NaN or ∞" : `${exact ? "" : "≈ "}${short(v)}${range}`);
  }
  if (rows.length > shown.length) add(tip, "div", { class: "quiet" }, `and ${rows.length - shown.length} more, further away`);
  tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

function zoomTo(ends) {
  state.zoom = ends && ends[1] - ends[0] > 1e-9 * Math.max(1, Math.abs(ends[1])) ? ends : null;
  update();
}

// Show `factor` times as much of the x axis, with `at` in its place.
function zoomBy(chart, factor, at) {
  const [lo, hi] = [chart.value(chart.box.left), chart.value(chart.box.right)], middle = at ?? (lo + hi) / 2;
  const ends = [middle - (middle - lo) * factor, middle + (hi - middle) * factor], saved = state.zoom;
  state.zoom = null;
  const all = sharedAxis(chart.width);
  state.zoom = saved;
  zoomTo(ends[0] <= all.lo && ends[1] >= all.hi ? null : [Math.max(all.lo, ends[0]), Math.min(all.hi, ends[1])]);
}

function listen(chart) {
  const svg = chart.figure.querySelector("svg"), pixel = (event) => event.clientX - svg.getBoundingClientRect().left;
  const places = () => [...new Set(chart.lines.flatMap((line) => line.xs))].filter(inZoom).sort((a, b) => a - b);
  const nearest = (event) => {
    const all = places();
    return all.length ? all[closest(all, chart.value(pixel(event)))] : null;
  };
  // A click chooses a step, also where the x axis is tokens or time.
  const select = (at) => {
    for (const line of chart.lines) {
      const i = at === null ? -1 : line.xs.indexOf(at);
      if (i >= 0 && line.steps) return selectStep(line.steps[i]);
    }
  };
  let start = null, dragged = false, box = null;
  const stop = () => { start = null; box?.remove(); box = null; };
  svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { start = pixel(event); dragged = false; } });
  svg.addEventListener("pointermove", (event) => {
    const { left, right, top, bottom } = chart.box, clamp = (p) => Math.max(left, Math.min(right, p));
    if (start !== null && event.buttons && Math.abs(pixel(event) - start) > 5) {
      if (!box) svg.setPointerCapture(event.pointerId);
      dragged = true;
      box ??= add(svg, "rect", { class: "selection", y: top, height: bottom - top });
      const [a, b] = [clamp(start), clamp(pixel(event))].sort((p, q) => p - q);
      box.setAttribute("x", a);
      box.setAttribute("width", b - a);
    }
    chart.at = nearest(event);
    point(chart, chart.at, event.clientX, event.clientY);
  });
  svg.addEventListener("pointerup", () => {
    if (box) {
      const from = Number(box.getAttribute("x")), to = from + Number(box.getAttribute("width"));
      stop();
      zoomTo([chart.value(from), chart.value(to)]);
    }
    stop();
  });
  svg.addEventListener("pointercancel", stop);
  svg.addEventListener("pointerleave", () => point(chart, null));
  svg.addEventListener("blur", () => point(chart, null));
  svg.addEventListener("click", (event) => { if (!dragged) select(nearest(event)); });
  svg.addEventListener("dblclick", () => zoomTo(null));
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    zoomBy(chart, (event.deltaY || event.deltaX) < 0 ? 0.8 : 1.25, chart.value(pixel(event)));
  }, { passive: false });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key], all = places();
    if (event.key === "Enter" && chart.at !== undefined) select(chart.at);
    if (event.key === "0" || event.key === "Escape") zoomTo(null);
    if (factor) zoomBy(chart, factor, chart.at);
    if (!move || !all.length) return;
    event.preventDefault();
    chart.at = all[Math.max(0, Math.min(all.length - 1, all.indexOf(chart.at) + move))];
    const where = svg.getBoundingClientRect();
    point(chart, chart.at, where.left + chart.x(chart.at), where.top + 20);
  });
}
