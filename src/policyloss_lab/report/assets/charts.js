// The basis of every chart of a report: its state, names of runs and keys, and the axis of steps.
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "1 5", "14 4"];
const state = { run: 0, step: null, group: null, sample: 0, token: 0, color: "ratio", only: null, find: "", show: "all", sort: "step",
  smooth: 0, theme: "system", log: new Set(), hidden: new Set(), keys: new Set(), x: "step", zoom: null, base: "", bands: false, marked: new Set() };
const charts = []; // {figure, draw}; after drawing also x (value → pixel), unit (of x) and line (the crosshair)
const visibleRuns = () => DATA.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));

const brief = (key) => DATA.labels[key] ?? key.replace(/^(policy|timing)\//, "");

function stepAxis(width) {
  const all = DATA.runs.flatMap((run) => run.steps.flatMap((steps) => [steps[0], steps[steps.length - 1]]));
  const found = axis(all, { tight: true, count: Math.max(2, Math.floor(width / 65)) });
  return { ...found, unit: "steps", ticks: found.ticks.filter(Number.isInteger) };
}

// Exponential moving average without the bias to its start; gaps stay gaps. On a log axis, which cannot show values of 0 and below,
// these stay unchanged: their average with earlier values would look like a decay.
function smoothed(values, weight, log) {
  let sum = 0, mass = 0;
  return values.map((v) => (v === null || (log && v <= 0) ? v : ((sum = weight * sum + (1 - weight) * v), (mass = weight * mass + 1 - weight), sum / mass)));
}
