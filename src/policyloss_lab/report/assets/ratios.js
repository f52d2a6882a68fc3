// The ratio's distribution: the histogram of one step, runs overlaid, and each run's histograms over all steps as a picture.
const histogramSteps = () => [...new Set(DATA.runs.flatMap((run) => run.histogram?.step ?? []))].sort((a, b) => a - b);
const closest = (steps, step) => steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(steps[best] - step) ? i : best), 0);
const histogramStep = () => {
  const steps = histogramSteps();
  return steps[closest(steps, state.step ?? steps[steps.length - 1])];
};
const withHistogram = () => visibleRuns().filter(({ run }) => run.histogram);
const ratioAxis = (count) => axis(DATA.runs.flatMap((run) => run.histogram?.edges ?? []), { log: true, tight: true, count });

function drawHistogram({ figure }) {
  const svg = figure.querySelector("svg"), log = state.log.has("histogram"), step = histogramStep();
  const shares = withHistogram().map(({ run, index }) => {
    const counts = run.histogram.counts[closest(run.histogram.step, step)], all = counts.reduce((a, b) => a + b, 0) || 1;
    return { run, index, share: counts.map((c) => c / all) };
  });
  const { x, y, box } = frame(svg, ratioAxis(6), axis(shares.flatMap((s) => s.share).concat(log ? [] : [0]), { log }), 210);
  const level = (v) => (log && v <= 0 ? box.bottom : y(v));
  for (const { run, index, share } of shares) {
    const edges = run.histogram.edges;
    const d = share.map((v, i) => `L${x(edges[i])} ${level(v)}L${x(edges[i + 1])} ${level(v)}`).join("");
    add(svg, "path", { class: `area run${index % 8}`, d: `M${x(edges[0])} ${box.bottom}${d}L${x(edges[edges.length - 1])} ${box.bottom}` });
    for (const end of run.band ?? [])
      if (x(end) > box.left && x(end) < box.right) add(svg, "line", { class: `band run${index % 8}`, x1: x(end), x2: x(end), y1: box.top, y2: box.bottom });
  }
  figure.querySelector(".log").setAttribute("aria-pressed", log);
  $("histogram-step").textContent = step;
  $("step-slider").max = histogramSteps().length - 1;
  $("step-slider").value = histogramSteps().indexOf(step);
}

// One pixel for each step and bin, stretched to the frame; the run's colour, stronger for a larger share (log scale).
function picture({ counts }, colour) {
  const canvas = document.createElement("canvas"), bins = counts[0].length, [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  [canvas.width, canvas.height] = [counts.length, bins];
  const context = canvas.getContext("2d"), image = context.createImageData(counts.length, bins);
  counts.forEach((row, s) => {
    const all = row.reduce((a, c) => a + c, 0) || 1;
    row.forEach((c, i) => {
      const strength = c ? Math.max(0.08, 1 + Math.log10(c / all) / 4) : 0;
      image.data.set([r, g, b, 255 * strength], 4 * ((bins - 1 - i) * counts.length + s));
    });
  });
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

function drawEvolution(chart) {
  const { figure } = chart, run = DATA.runs[chart.index], svg = figure.querySelector("svg"), { edges, step } = run.histogram;
  figure.hidden = state.hidden.has(chart.index);
  if (figure.hidden) return;
  const scales = frame(svg, stepAxis(svg.clientWidth), ratioAxis(4), 210), { x, y, box } = scales;
  const half = (x(step[step.length - 1]) - x(step[0])) / Math.max(1, step.length - 1) / 2 || 8, top = y(edges[edges.length - 1]);
  const href = picture(run.histogram, getComputedStyle(figure.querySelector(".swatch")).backgroundColor);
  const from = Math.max(box.left, x(step[0]) - half), to = Math.min(box.right, x(step[step.length - 1]) + half);
  add(svg, "image", { href, x: from, y: top, width: to - from, height: y(edges[0]) - top, preserveAspectRatio: "none" });
  for (const end of run.band ?? [])
    if (y(end) > box.top && y(end) < box.bottom) add(svg, "line", { class: "band", x1: box.left, x2: box.right, y1: y(end), y2: y(end) });
  Object.assign(chart, scales, { line: add(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" }) });
}

function startRatios() {
  if (!histogramSteps().length) return;
  $("step-slider").addEventListener("input", (event) => { state.step = histogramSteps()[event.target.value]; update(); });
  charts.push({ figure: $("histogram"), panel: { id: "histogram", keys: [] }, draw: drawHistogram });
  for (const { run, index } of withHistogram()) {
    const figure = add($("evolution"), "figure", { class: "chart" }), caption = add(figure, "figcaption");
    add(caption, "i", { class: `swatch run${index % 8}` });
    add(caption, "h3", {}, run.label);
    add(caption, "span", { class: "quiet" }, "The same at every step: the stronger the colour, the more tokens (log scale). Click a step to see its histogram.");
    const svg = figure.appendChild(document.createElementNS(SVG, "svg")), chart = { figure, index, draw: drawEvolution };
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `Distribution of the ratio at every step, ${run.label}`);
    svg.addEventListener("click", (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left, { step } = DATA.runs[index].histogram;
      selectStep(step[closest(step.map(chart.x), at)]);
    });
    charts.push(chart);
  }
}
