// The page as a whole: its state, which is also in the address after #, so that a view can be linked; the toolbar; redrawing.
const NUMBERS = ["run", "step", "group", "sample", "token", "only", "smooth"], TEXTS = ["find", "show", "sort"], SETS = ["log", "hidden"];

function load() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of NUMBERS) if (given.has(name) && given.get(name) !== "" && Number.isFinite(Number(given.get(name)))) state[name] = Number(given.get(name));
  for (const name of SETS) if (given.has(name)) state[name] = new Set(given.get(name).split(",").filter(Boolean).map((v) => (name === "hidden" ? Number(v) : v)));
  for (const name of TEXTS) if (given.has(name)) state[name] = given.get(name);
  if (Object.hasOwn(COLOURS, given.get("color") ?? "")) state.color = given.get("color");
  if (["system", "light", "dark"].includes(given.get("theme"))) state.theme = given.get("theme");
  state.run = Math.max(0, Math.min(Math.trunc(state.run), DATA.runs.length - 1));
  for (const name of ["sample", "token"]) state[name] = Math.max(0, Math.trunc(state[name]));
  state.smooth = Math.max(0, Math.min(0.95, state.smooth));
}

function save() {
  const out = new URLSearchParams();
  for (const name of [...NUMBERS, ...TEXTS, "color", "theme"]) if (state[name] !== null) out.set(name, state[name]);
  for (const name of SETS) out.set(name, [...state[name]].join(","));
  history.replaceState(null, "", `#${out}`);
}

const drawCharts = () => { for (const chart of charts) if (chart.figure.offsetParent !== null || chart.run) chart.draw(chart); };

function update() {
  document.documentElement.dataset.theme = state.theme;
  $("theme").textContent = `Theme: ${state.theme}`;
  $("smooth").value = state.smooth;
  $("smoothness").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
  document.querySelectorAll("#legend button").forEach((button, i) => button.setAttribute("aria-pressed", !state.hidden.has(i)));
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
  DATA.runs.forEach((run, i) => {
    const button = add($("legend"), "button", { type: "button" });
    add(button, "i", { class: `swatch run${i % 8}` });
    add(button, "bdi", {}, run.label);
    button.addEventListener("click", () => toggle(state.hidden, i));
  });
  $("smooth").addEventListener("input", (event) => { state.smooth = Number(event.target.value); update(); });
  $("theme").addEventListener("click", () => { state.theme = { system: "light", light: "dark", dark: "system" }[state.theme]; update(); });
}

function startPanels() {
  for (const figure of document.querySelectorAll("figure[data-panel]")) {
    const chart = { figure, panel: DATA.panels[Number(figure.dataset.panel)], draw: drawPanel };
    if (chart.panel.keys.length > 1) for (const [k, key] of chart.panel.keys.entries()) {
      const button = add(figure.querySelector(".keys"), "button", { type: "button", "aria-pressed": true });
      const sample = button.appendChild(document.createElementNS(SVG, "svg"));
      add(sample, "line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-dasharray": DASHES[k % DASHES.length] });
      add(button, "span", {}, brief(key));
      button.addEventListener("click", () => { toggle(state.keys, key); button.setAttribute("aria-pressed", !state.keys.has(key)); });
    }
    charts.push(chart);
    listen(chart);
  }
}

state.smooth = DATA.runs.some((run) => run.steps.some((steps) => steps.length >= 30)) ? 0.6 : 0;
state.log = new Set(DATA.panels.filter((panel) => panel.log).map((panel) => panel.id));
startToolbar();
startPanels();
startRatios();
startTokens();
for (const { figure, panel } of charts) if (panel) figure.querySelector(".log").addEventListener("click", () => toggle(state.log, panel.id));
document.querySelector("#more details")?.addEventListener("toggle", drawCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
addEventListener("hashchange", () => { load(); update(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCharts(); } });
load();
update();
