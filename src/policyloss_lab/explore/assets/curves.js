// The curves of one token over its ratio, for both signs of the advantage.

const DASHES = ["", "7 4", "2 3"];
const POINTS = 181;
// The other probabilities of a token, relative to the old policy's: argument, setting, label.
const POLICIES = [
  ["rollout_logp", "rollout", "π_old / π_rollout (engine)"],
  ["ref_logp", "ref", "π_old / π_ref (reference)"],
  ["teacher_logp", "teacher", "π_old / π_teacher"],
];
const ZOOMS = [
  [0, 3],
  [0.5, 1.5],
  [0.9, 1.1],
  [0.99, 1.01],
  [0.999, 1.001],
];

// Tokens with these ratios to the old policy, as the evaluator takes them. weights: of the engine.
function stepOf(ratios, { advantages, row, column, weights }) {
  const base = Math.log(view.probability),
    many = (x) => Array(ratios.length).fill(x);
  const step = {
    logp: ratios.map((ratio) => base + Math.log(ratio)),
    old_logp: many(base),
    advantages,
    row,
    column,
    entropy: many(1),
    ages: many(1),
    divergence: many(0.1),
    group: many(0),
    horizon: view.horizon,
  };
  for (const [argument, setting] of POLICIES) {
    step[argument] = many(base - Math.log(view[setting]));
  }
  if (weights) step.rollout_logp = weights.map((weight) => base - Math.log(weight));
  return step;
}

// The loss and the gradient weight of a token alone at each ratio. Each is a sequence by itself.
function curve(lines, ratios, sign) {
  const row = ratios.map((_, i) => i),
    of = lines.some(([name]) => name === "token_loss") ? "token_loss" : "surrogate";
  const step = stepOf(ratios, {
    advantages: row.map(() => sign * view.advantage),
    row,
    column: row.map(() => 0),
  });
  const result = evaluate(lines, step, of),
    mask = result.value("mask"),
    value = result.value(of);
  const gradient = result.gradient("logp");
  return {
    loss: row.map((i) => (mask[i] ? at(value, i) : null)),
    weight: row.map((i) => (mask[i] ? -gradient[i] + 0 : 0)),
  };
}

// Where the gradient begins or ceases to be 0 between neighbouring ratios.
function edgesOf(lines, ratios, weight, sign) {
  let pairs = ratios
    .slice(1)
    .map((_, i) => i)
    .filter((i) => (weight[i] === 0) !== (weight[i + 1] === 0))
    .map((i) => ({ low: ratios[i], high: ratios[i + 1], zero: weight[i] === 0 }));
  for (let round = 0; round < 40 && pairs.length; round++) {
    const middles = pairs.map(({ low, high }) => (low + high) / 2);
    const values = curve(lines, middles, sign).weight;
    pairs = pairs.map((pair, i) =>
      (values[i] === 0) === pair.zero
        ? { ...pair, low: middles[i] }
        : { ...pair, high: middles[i] },
    );
  }
  return pairs;
}

// The curve over the visible range, with points on both sides of every edge, and its intervals
// without gradient.
function sampled(lines, sign) {
  const [low, high] = view.zoom,
    last = Math.min(high, 0.999 / view.probability);
  const first = low === 0 ? last / POINTS : low;
  let ratios = Array.from(
    { length: POINTS },
    (_, i) => first + ((last - first) * i) / (POINTS - 1),
  );
  const edges = edgesOf(lines, ratios, curve(lines, ratios, sign).weight, sign);
  ratios = [...ratios, ...edges.flatMap((edge) => [edge.low, edge.high])].sort((a, b) => a - b);
  const values = curve(lines, ratios, sign),
    zero = [];
  ratios.forEach((ratio, i) => {
    if (values.weight[i] !== 0) return;
    if (i && values.weight[i - 1] === 0 && zero.length) zero.at(-1)[1] = ratio;
    else zero.push([ratio, ratio]);
  });
  return { ratios, ...values, zero, edges };
}

// Intervals of the ratio in words.
function intervalsInWords(zero, ratios) {
  const ends = [ratios[0], ratios.at(-1)];
  return zero
    .map(([low, high]) => {
      if (low === ends[0] && high === ends[1]) return "everywhere here";
      if (low === ends[0]) return `below ${short(high, 6)}`;
      return high === ends[1] ? `above ${short(low, 6)}` : `${short(low, 6)} to ${short(high, 6)}`;
    })
    .join(", ");
}

function path(xs, ys, x, y) {
  let text = "",
    drawing = false;
  xs.forEach((v, i) => {
    const fits = ys[i] !== null && Number.isFinite(ys[i]);
    if (fits) text += `${drawing ? "L" : "M"}${x(v).toFixed(2)} ${y(ys[i]).toFixed(2)}`;
    drawing = fits;
  });
  return text;
}

// Draw the four charts. losses: each with its samples by sign, if it has curves.
function drawCurves(losses) {
  for (const svg of document.querySelectorAll("#token svg")) {
    const sign = Number(svg.dataset.sign),
      { of } = svg.dataset,
      drawn = losses.filter(({ samples }) => samples);
    const values = drawn
      .flatMap(({ samples }) => samples[sign][of])
      .filter((v) => v !== null && Number.isFinite(v));
    const xAxis = axis(view.zoom, { tight: true, count: 5 });
    const { x, y, box } = frame(svg, xAxis, axis(of === "loss" ? values : [...values, 0]), 210);
    drawn.forEach(({ samples, index, partial }, place) => {
      if (partial) return;
      for (const [low, high] of samples[sign].zero) {
        const size = { x: x(low), width: Math.max(0, x(high) - x(low)) };
        add(svg, "rect", {
          class: `flat run${index}`,
          ...size,
          y: box.top,
          height: box.bottom - box.top,
        });
        add(svg, "rect", {
          class: `strip run${index}`,
          ...size,
          y: box.bottom - 4 * (place + 1),
          height: 3,
        });
      }
    });
    if (view.zoom[0] <= 1 && view.zoom[1] >= 1)
      add(svg, "line", { class: "rule one", x1: x(1), x2: x(1), y1: box.top, y2: box.bottom });
    for (const { samples, index } of drawn) {
      const { ratios } = samples[sign];
      add(svg, "path", {
        class: `line run${index}`,
        d: path(ratios, samples[sign][of], x, y),
        "stroke-dasharray": DASHES[index],
      });
    }
    const at = Math.min(Math.max(view.read, view.zoom[0]), view.zoom[1]);
    add(svg, "line", { class: "cross", x1: x(at), x2: x(at), y1: box.top, y2: box.bottom });
    svg.onpointerdown = svg.onpointermove = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const { left, width } = svg.getBoundingClientRect(),
        share = ((event.clientX - left) / width) * svg.viewBox.baseVal.width;
      const ratio =
        view.zoom[0] +
        ((share - box.left) / (box.right - box.left)) * (view.zoom[1] - view.zoom[0]);
      setReading(Math.min(Math.max(ratio, view.zoom[0]), view.zoom[1]));
    };
    const title = svg.closest("figure").querySelector("h3").textContent;
    const says = drawn.map(
      ({ samples, label }) =>
        `${label}: from ${short(samples[sign][of][0])} to ${short(samples[sign][of].at(-1))}`,
    );
    const from = `${title}, over the ratio from ${view.zoom.map((v) => short(v)).join(" to ")}`;
    const more = "The table below reads the curves at any ratio.";
    svg.setAttribute("aria-label", `${from}. ${says.join("; ")}. ${more}`);
  }
}

// The table under the curves: their values at one ratio, and where there is no gradient.
function drawReading(losses) {
  const slider = $("read-at"),
    body = document.querySelector("#reading tbody");
  const [low, high] = view.zoom;
  Object.assign(slider, { min: low || high / POINTS, max: high, step: (high - low) / 300 });
  slider.value = view.read;
  $("read-at-value").textContent = short(view.read);
  body.replaceChildren();
  for (const { lines, samples, label, index, note, partial } of losses) {
    const row = add(body, "tr"),
      name = add(row, "th", { scope: "row" });
    add(name, "i", { class: `swatch run${index}` });
    add(name, "span", {}, label);
    if (!samples) {
      add(row, "td", { colspan: 5 }, note);
      continue;
    }
    const zero = [1, -1].map((sign) => {
      const values = curve(lines, [Math.max(view.read, 1e-9)], sign);
      add(row, "td", {}, short(values.loss[0]));
      add(row, "td", {}, short(values.weight[0]));
      const words = intervalsInWords(samples[sign].zero, samples[sign].ratios);
      return words ? `A ${sign > 0 ? ">" : "<"} 0: ${words}` : "";
    });
    const text = partial ? "" : zero.filter(Boolean).join("; ") || "nowhere here";
    const cell = add(row, "td", {}, text);
    if (note) add(cell, "span", { class: "quiet" }, `${text ? " · " : ""}${note}`);
  }
}
