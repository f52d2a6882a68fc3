// A chart as text and as files: a summary for a screen reader, its numbers as a table, CSV, SVG.
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "text-anchor"];

// The first, last, lowest and highest value of a line, each with its place.
function extremes(line) {
  let first, last, low, high;
  line.shown.forEach((v, i) => {
    if (!fits(v) || !inZoom(line.xs[i])) return;
    const here = { v, x: line.xs[i] };
    first ??= here;
    last = here;
    if (!low || v < low.v) low = here;
    if (!high || v > high.v) high = here;
  });
  return first && { line, first, last, low, high };
}

const titleOf = (panel, line) => (panel.keys.length > 1 ? `${line.name}, ${brief(line.key)}` : line.name);

function gist(panel, lines) {
  const known = lines.map(extremes).filter(Boolean), { label } = UNITS[state.x];
  const name = `${panel.title} over ${UNITS[state.x].over}${state.base ? ", as a difference" : ""}`;
  const told = ({ line, first, last, low, high }) => `${titleOf(panel, line)}: first ${short(first.v)}, last ${short(last.v)}, highest ${short(high.v)} at ${label(high.x)}, lowest ${short(low.v)} at ${label(low.x)}`;
  const ends = [...known].sort((a, b) => a.last.v - b.last.v), extreme = (one) => `${short(one.last.v)} (${titleOf(panel, one.line)})`;
  const text = known.length > 8 ? `${known.length} lines, which end between ${extreme(ends[0])} and ${extreme(ends[ends.length - 1])}` : known.map(told).join(". ");
  return `${name}. ${text || "Nothing to show"}. Arrow keys read it point by point, + and − zoom, 0 shows all.`;
}

function drawNumbers({ figure, panel, lines }) {
  const box = figure.querySelector(".numbers");
  if (!box.open) return;
  box.querySelector("div")?.remove();
  const table = add(add(box, "div", { class: "wide" }), "table"), head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  for (const name of ["Line", "First", "Last", "Lowest", "Highest"]) add(head, "th", { scope: "col" }, name);
  for (const { line, ...places } of lines.map(extremes).filter(Boolean)) {
    const row = add(body, "tr"), name = add(row, "th", { scope: "row" });
    add(name, "i", { class: `swatch run${line.index % 8}` });
    add(name, "bdi", {}, titleOf(panel, line));
    for (const place of ["first", "last", "low", "high"]) add(row, "td", { title: UNITS[state.x].label(places[place].x) }, short(places[place].v));
  }
}

function saveFile(name, kind, text) {
  const link = document.createElement("a"), address = URL.createObjectURL(new Blob([text], { type: kind }));
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// A cell of a CSV file. A spreadsheet would run a text that begins like a formula, so it gets a leading quote.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// Every logged point of the visible runs: not smoothed, no mean, no difference.
function csvOf(panel) {
  const rows = [["run", "metric", "step", "tokens", "seconds", "value"]];
  for (const { run } of visibleRuns()) for (const key of panel.keys) {
    if (!run.series[key] || state.keys.has(key)) continue;
    const [which, values] = run.series[key], sum = ({ progress }, unit, step) => progress[unit] && valueAt(progress[unit].step, progress[unit].value, step);
    run.steps[which].forEach((step, i) => rows.push([run.label, key, step, sum(run, "tokens", step), sum(run, "seconds", step), values[i]]));
  }
  return rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
}

// The chart as on the screen, with its colours, a title and a key, as a standalone picture.
function svgOf({ figure, panel, lines }) {
  const svg = figure.querySelector("svg"), copy = svg.cloneNode(true), width = svg.viewBox.baseVal.width, keys = lines.slice(0, 20);
  const originals = svg.querySelectorAll("*"), style = getComputedStyle(figure), height = HEIGHT + 40 + 18 * keys.length;
  copy.querySelectorAll("*").forEach((node, i) => {
    const computed = getComputedStyle(originals[i]);
    for (const name of STYLES) node.setAttribute(name, computed.getPropertyValue(name));
  });
  const out = svg.cloneNode(false), text = { fill: style.color, "font-family": style.fontFamily };
  for (const name of ["style", "tabindex", "role", "class"]) { out.removeAttribute(name); copy.removeAttribute(name); }
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) out.setAttribute(name, value);
  add(out, "rect", { width, height, fill: style.backgroundColor });
  add(out, "text", { ...text, x: 10, y: 20, "font-size": 14, "font-weight": 600 }, `${panel.title}${state.base ? " (difference)" : ""}`);
  for (const [name, value] of Object.entries({ y: 28, width, height: HEIGHT })) copy.setAttribute(name, value);
  copy.querySelector(".cross")?.remove();
  out.append(copy);
  keys.forEach((line, i) => {
    const y = HEIGHT + 44 + 18 * i, stroke = getComputedStyle(line.node.querySelector(".line")).stroke;
    add(out, "line", { x1: 12, x2: 40, y1: y - 4, y2: y - 4, stroke, "stroke-width": 2, "stroke-dasharray": DASHES[line.k % DASHES.length] });
    add(out, "text", { ...text, x: 48, y, "font-size": 12 }, titleOf(panel, line));
  });
  return new XMLSerializer().serializeToString(out);
}

function startExport(chart) {
  const { figure, panel } = chart, file = panel.id.replace(/\W+/g, "_");
  figure.querySelector(".csv").addEventListener("click", () => saveFile(`${file}.csv`, "text/csv", csvOf(panel)));
  figure.querySelector(".svg").addEventListener("click", () => saveFile(`${file}.svg`, "image/svg+xml", svgOf(chart)));
  figure.querySelector(".numbers").addEventListener("toggle", () => drawNumbers(chart));
}
