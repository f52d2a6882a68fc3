// The page as a whole: its state, which is also in the address after #, so that a view can be linked; the toolbar; redrawing.
const NUMBERS = ["run", "step", "group", "sample", "token", "only", "smooth"], TEXTS = ["find", "show", "sort", "base"];
const SETS = ["log", "hidden", "marked"], OF_RUNS = ["hidden", "marked"];
let waiting = []; // charts that are drawn when there is time, because they are not on the screen

function load() {
  const given = new URLSearchParams(location.hash.slice(1)), numeric = (text) => text !== "" && Number.isFinite(Number(text));
  for (const name of NUMBERS) if (numeric(given.get(name) ?? "")) state[name] = Number(given.get(name));
  for (const name of SETS) if (given.has(name)) state[name] = new Set(given.get(name).split(",").filter(Boolean).map((v) => (OF_RUNS.includes(name) ? Number(v) : v)));
  for (const name of TEXTS) if (given.has(name)) state[name] = given.get(name);
  if (Object.hasOwn(COLOURS, given.get("color") ?? "")) state.color = given.get("color");
  if (["system", "light", "dark"].includes(given.get("theme"))) state.theme = given.get("theme");
  if (Object.hasOwn(UNITS, given.get("x") ?? "")) state.x = given.get("x");
  if (given.has("bands")) state.bands = given.get("bands") === "1" && DATA.groups.some(({ runs }) => runs.length > 1);
  const zoom = (given.get("zoom") ?? "").split(",");
  if (given.has("zoom")) state.zoom = zoom.length === 2 && zoom.every(numeric) && Number(zoom[0]) < Number(zoom[1]) ? zoom.map(Number) : null;
  state.run = Math.max(0, Math.min(Math.trunc(state.run), DATA.runs.length - 1));
  for (const name of ["sample", "token"]) state[name] = Math.max(0, Math.trunc(state[name]));
  state.smooth = Math.max(0, Math.min(0.95, state.smooth));
}

function save() {
  const out = new URLSearchParams();
  for (const name of [...NUMBERS, ...TEXTS, "color", "theme", "x"]) if (state[name] !== null) out.set(name, state[name]);
  for (const name of SETS) out.set(name, [...state[name]].join(","));
  out.set("bands", Number(state.bands));
  out.set("zoom", (state.zoom ?? []).join(","));
  // A page inside a notebook has no address that may be changed.
  try { history.replaceState(null, "", `#${out}`); } catch { /* then no link holds the view */ }
}

// Draw the charts that are on the screen now, and the others when there is time.
function drawCharts(wanted = () => true) {
  const near = ({ figure }) => { const { top, bottom } = figure.getBoundingClientRect(); return top < 1.5 * innerHeight && bottom > -0.5 * innerHeight; };
  const asked = charts.filter((chart) => wanted(chart) || waiting.includes(chart));
  for (const chart of asked) chart.boxless = chart.figure.offsetParent === null && chart.draw !== drawEvolution;
  const due = asked.filter((chart) => !chart.boxless);
  const now = due.filter(near);
  waiting = due.filter((chart) => !now.includes(chart));
  for (const chart of now) chart.draw(chart);
  if (waiting.length) setTimeout(drawWaiting);
}

function drawWaiting(limit = 20) {
  const end = performance.now() + limit;
  while (waiting.length && performance.now() < end) {
    const chart = waiting.shift();
    chart.draw(chart);
  }
  if (waiting.length) setTimeout(drawWaiting);
}

function update() {
  document.documentElement.dataset.theme = state.theme;
  $("theme").textContent = `Theme: ${state.theme}`;
  $("smooth").value = state.smooth;
  $("smoothness").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
  $("unit").value = state.x;
  $("bands").checked = state.bands;
  $("reset").hidden = !state.zoom;
  drawRuns();
  drawBases();
  drawCharts();
  drawTokens();
  save();
}

function selectStep(step) {
  if (step === null) return;
  Object.assign(state, { step, group: null, sample: 0, token: 0 });
  update();
}

function toggle(set, value) {
  if (!set.delete(value)) set.add(value);
  update();
}

function startToolbar() {
  $("smooth").addEventListener("input", (event) => { state.smooth = Number(event.target.value); update(); });
  $("theme").addEventListener("click", () => { state.theme = { system: "light", light: "dark", dark: "system" }[state.theme]; update(); });
  $("unit").addEventListener("change", (event) => { state.x = event.target.value; state.zoom = null; update(); });
  $("reset").addEventListener("click", () => zoomTo(null));
}

function startPanels() {
  for (const figure of document.querySelectorAll("figure[data-panel]")) {
    const chart = { figure, panel: DATA.panels[Number(figure.dataset.panel)], draw: drawPanel };
    if (chart.panel.keys.length > 1) for (const [k, key] of chart.panel.keys.entries()) {
      const button = add(figure.querySelector(".keys"), "button", { type: "button", "aria-pressed": true, title: key });
      const sample = button.appendChild(document.createElementNS(SVG, "svg"));
      add(sample, "line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-dasharray": DASHES[k % DASHES.length] });
      add(button, "span", {}, brief(key));
      button.addEventListener("click", () => { toggle(state.keys, key); button.setAttribute("aria-pressed", !state.keys.has(key)); });
    }
    charts.push(chart);
    listen(chart);
    startExport(chart);
  }
}

state.smooth = DATA.runs.some((run) => run.steps.some((steps) => steps.length >= 30)) ? 0.6 : 0;
state.bands = DATA.groups.some(({ runs }) => runs.length > 1);
state.log = new Set(DATA.panels.filter((panel) => panel.log).map((panel) => panel.id));
startToolbar();
startRuns();
startPanels();
startRatios();
startTokens();
for (const { figure, panel } of charts) if (panel) figure.querySelector(".log").addEventListener("click", () => toggle(state.log, panel.id));
// Charts that had no box when they were due: in closed details, or in a frame without a layout yet.
const boxes = new ResizeObserver(() => { if (charts.some((chart) => chart.boxless)) drawCharts((chart) => chart.boxless); });
for (const { figure } of charts) boxes.observe(figure);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts());
addEventListener("hashchange", () => { load(); update(); });
// Details cannot be opened on paper.
const more = document.querySelector("#more details");
let opened = false;
addEventListener("beforeprint", () => {
  if (more && !more.open) more.open = opened = true;
  drawCharts((chart) => chart.boxless);
  drawWaiting(Infinity);
});
addEventListener("afterprint", () => { if (opened) more.open = opened = false; });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCharts(); } });
load();
update();
startLive();
