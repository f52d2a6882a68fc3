// A page of `policyloss report --serve` fetches itself again, and draws the changes.
let tag = null;

// The structure of a page: if it has changed, the page is reloaded; the address keeps the view.
const outline = (page, data) => JSON.stringify([
  [...page.querySelectorAll("main section")].map((section) => section.id),
  data.panels.map((panel) => [panel.id, panel.keys]),
  data.runs.map((run) => [run.label, Boolean(run.histogram)]),
  data.groups,
]);

function takeHeader(page) {
  const header = document.querySelector("header"), open = [...header.querySelectorAll("details")].map((node) => node.open);
  header.replaceChildren(...page.querySelector("header").childNodes);
  header.querySelectorAll("details").forEach((node, i) => { if (i in open) node.open = open[i]; });
}

function takeData(data) {
  const changed = new Set(), differ = (a, b) => JSON.stringify(a) !== JSON.stringify(b), width = 1000, before = sharedAxis(width);
  let tokens = false;
  data.runs.forEach((run, i) => {
    const old = DATA.runs[i], points = ({ steps, series }, key) => series[key] && [steps[series[key][0]], series[key][1]];
    for (const key of Object.keys(run.series)) if (differ(points(run, key), points(old, key))) changed.add(key);
    if (differ(run.histogram, old.histogram)) changed.add("histogram");
    tokens ||= differ(run.rollouts, old.rollouts);
  });
  Object.assign(DATA, data);
  const axisMoved = differ(before, sharedAxis(width));
  drawCharts(({ panel }) => axisMoved || !panel || panel.id === "histogram" || panel.keys.some((key) => changed.has(key)));
  if (tokens) drawTokens();
}

async function ask() {
  const answer = await fetch(location.pathname, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 304) return "up to date";
  if (!answer.ok) return `the report cannot be made: ${(await answer.text()).slice(0, 300)}`;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html"), data = JSON.parse(page.getElementById("data").textContent);
  tag = answer.headers.get("ETag");
  if (outline(page, data) !== outline(document, DATA)) return void location.reload();
  takeHeader(page);
  takeData(data);
  return "up to date";
}

async function poll() {
  if (!document.hidden) {
    let text = "no answer; is `policyloss report` still running?";
    try { text = await ask(); } catch { /* the text says it */ }
    const now = new Date().toLocaleTimeString();
    if (text && $("live").dataset.text !== text) { $("live").dataset.text = text; $("live").textContent = `Live: ${text}`; }
    $("live").title = `Last asked at ${now}`;
  }
  setTimeout(poll, Number(document.documentElement.dataset.live)); // milliseconds
}

function startLive() {
  if (!("live" in document.documentElement.dataset)) return;
  $("live").hidden = false;
  poll();
}
