// From the data of the runs to the lines of a chart: on which x, smoothed, as a band over seeds, as a difference.
const UNITS = {
  step: { over: "steps", label: (x) => `step ${short(x, 6)}`, tick: (x) => short(x, 6) },
  tokens: { over: "tokens", label: (x) => `${Math.round(x).toLocaleString("en")} tokens`, tick: compactNumber },
  seconds: { over: "time", label: clockText, tick: clockText },
};

function compactNumber(x) {
  const [size, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => x >= size) ?? [1, ""];
  return short(x / size, 3) + letter;
}

function clockText(seconds) {
  if (seconds < 60) return `${short(seconds, 3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

// The value of a line at x, between its points; null outside of the line and next to a gap.
function valueAt(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (high < 0 || x < xs[0] || x > xs[high]) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  if (xs[low] === x) return ys[low];
  const [a, b] = [ys[low - 1], ys[low]];
  return a === null || b === null ? null : a + ((b - a) * (x - xs[low - 1])) / (xs[low] - xs[low - 1]);
}

// The steps of a run on the x axis; null if the run did not log that quantity.
function placesOf(run, which) {
  if (state.x === "step") return run.steps[which];
  const sums = run.progress[state.x], cached = `${state.x}${which}`;
  if (!sums) return null;
  run.places ??= new Map();
  if (!run.places.has(cached)) {
    const { step, value } = sums, last = step.length - 1;
    run.places.set(cached, run.steps[which].map((s) => (s < step[0] ? 0 : s > step[last] ? value[last] : valueAt(step, value, s))));
  }
  return run.places.get(cached);
}

// One metric of one run: {name, index (its colour), runs, key, k (its dashes), steps, xs, values, shown}.
function runLine(index, key, k, log) {
  const run = DATA.runs[index], series = run.series[key], xs = series && placesOf(run, series[0]);
  if (!xs) return null;
  const values = series[1], sparse = key.startsWith("eval/");
  return { name: run.label, index, runs: [index], key, k, sparse, steps: run.steps[series[0]], xs, values, shown: state.smooth && !sparse ? smoothed(values, state.smooth, log) : values };
}

// The mean of the same metric of several runs, with its range: `low`, `high` and `shown`.
function bandLine(group, key, k, log) {
  const members = group.runs.filter((i) => !state.hidden.has(i)).map((i) => runLine(i, key, k, log)).filter(Boolean);
  if (members.length < 2) return members[0] ?? null;
  const xs = [...new Set(members.flatMap((line) => line.xs))].sort((a, b) => a - b), columns = { shown: [], low: [], high: [], count: [] };
  for (const x of xs) {
    const here = members.map((line) => valueAt(line.xs, line.shown, x)).filter((v) => v !== null);
    columns.shown.push(here.length ? here.reduce((a, b) => a + b) / here.length : null);
    columns.low.push(here.length ? Math.min(...here) : null);
    columns.high.push(here.length ? Math.max(...here) : null);
    columns.count.push(here.length);
  }
  return { ...members[0], name: group.label, index: group.runs[0], runs: members.flatMap((line) => line.runs), steps: state.x === "step" ? xs : null, xs, values: columns.shown, size: members.length, ...columns };
}

// The owners of lines: the visible runs, or the groups of seeds.
const subjects = () => (state.bands ? DATA.groups : DATA.runs.map((run, i) => ({ label: run.label, runs: [i] })));
const lineOf = (subject, key, k, log) => (subject.runs.length > 1 ? bandLine(subject, key, k, log) : state.hidden.has(subject.runs[0]) ? null : runLine(subject.runs[0], key, k, log));

// The baseline of the comparison: "r2" is the third run, "g0" the first group of seeds.
function baseSubject() {
  const index = Number(state.base.slice(1));
  return state.base[0] === "g" ? DATA.groups[index] : state.base[0] === "r" && DATA.runs[index] ? { runs: [index] } : undefined;
}

function linesOf(panel) {
  const base = baseSubject(), log = !base && state.log.has(panel.id), lines = [];
  panel.keys.forEach((key, k) => {
    if (state.keys.has(key)) return;
    const zero = base && (base.runs.length > 1 ? bandLine(base, key, k) : runLine(base.runs[0], key, k));
    for (const subject of subjects()) {
      const line = lineOf(subject, key, k, log);
      if (!line || (base && !zero)) continue;
      lines.push(zero ? minusBase(line, zero) : line);
    }
  });
  return lines;
}

function minusBase(line, zero) {
  const less = (ys, of) => ys && ys.map((y, i) => (y === null || of[i] === null ? undefined : y - of[i]));
  const shown = line.xs.map((x) => valueAt(zero.xs, zero.shown, x)), raw = line.xs.map((x) => valueAt(zero.xs, zero.values, x));
  return { ...line, values: less(line.values, raw), shown: less(line.shown, shown), low: less(line.low, shown), high: less(line.high, shown) };
}

// The visible lines that coincide, as lists of lines.
function coincidingLines(lines) {
  if (state.bands) return [];
  return Object.values(Object.groupBy(lines, (line) => line.key)).flatMap((ofKey) =>
    (DATA.same[ofKey[0].key] ?? []).map((runs) => ofKey.filter((line) => runs.includes(line.index))).filter((same) => same.length > 1));
}

const inZoom = (x) => !state.zoom || (x >= state.zoom[0] && x <= state.zoom[1]);

// The x axis that all charts of lines share.
function sharedAxis(width) {
  let ends = state.zoom;
  if (!ends) {
    ends = [Infinity, -Infinity];
    for (const run of DATA.runs) run.steps.forEach((_, which) => {
      const places = placesOf(run, which) ?? [];
      if (places.length) ends = [Math.min(ends[0], places[0]), Math.max(ends[1], places[places.length - 1])];
    });
  }
  const scale = axis(ends.filter(Number.isFinite), { tight: true, count: Math.max(2, Math.floor(width / (state.x === "seconds" ? 95 : 65))) });
  if (state.x !== "step") return { ...scale, unit: UNITS[state.x].over, label: UNITS[state.x].tick };
  return { ...scale, unit: UNITS.step.over, ticks: scale.hi - scale.lo > 1 ? scale.ticks.filter(Number.isInteger) : scale.ticks };
}
