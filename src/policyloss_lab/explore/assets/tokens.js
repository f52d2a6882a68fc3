// A small step: two sequences with tokens that can be moved, and the effect of each loss on them.

const LENGTHS = [6, 3];
const ROWS = LENGTHS.flatMap((length, row) => Array(length).fill(row));
// A tool's answer is in the middle of the first sequence, so it has two turns.
const COLUMNS = LENGTHS.flatMap((length) => Array.from({ length }, (_, i) => (i < 3 ? i : i + 1)));
const RATIOS = [1.05, 0.9, 1.3, 1.0, 0.8, 1.1, 1.15, 0.85, 1.4];
const WEIGHTS = [1.0, 1.1, 0.9, 1.0, 1.6, 1.0, 0.95, 1.0, 1.05];
const REACH = [0.25, 4];
const MARKS = { ratios: "ratio π / π_old", weights: "engine weight π_old / π_rollout" };

const tokenName = (i) => {
  const place = ROWS.slice(0, i).filter((row) => row === ROWS[i]).length + 1;
  return `token ${place} of sequence ${ROWS[i] + 1}`;
};
const readsEngine = (losses) => losses.some(({ lines }) => readsOf(lines).includes("rollout_logp"));

// The effect of a loss in the step of the page.
function stepResult(lines) {
  const step = stepOf(view.ratios, {
    advantages: ROWS.map((row) => view.advantages[row]),
    row: ROWS,
    column: COLUMNS,
    weights: view.weights,
  });
  const result = evaluate(lines, step),
    kept = result.has("keep") ? result.value("keep") : null;
  return { loss: result.value("loss"), weight: result.gradient("logp").map((g) => -g + 0), kept };
}

function moveToken(kind, i, value, focus) {
  view[kind][i] = Math.min(Math.max(Number(value.toPrecision(4)), REACH[0]), REACH[1]);
  redrawStep();
  if (focus) document.querySelector(`#token-marks [data-kind="${kind}"][data-i="${i}"]`)?.focus();
}

// The marks of the tokens, each a slider for the keyboard and the pointer.
function drawTokens(losses) {
  const svg = $("token-marks"),
    kinds = readsEngine(losses) ? ["ratios", "weights"] : ["ratios"];
  $("tokens-title").textContent = kinds
    .map((kind) => `${kind === "ratios" ? "●" : "■"} ${MARKS[kind]}`)
    .join("   ");
  const { x, y, box } = frame(
    svg,
    { lo: -0.6, hi: ROWS.length - 0.4, ticks: [] },
    { lo: REACH[0], hi: REACH[1], ticks: [0.25, 0.5, 1, 2, 4], log: true },
    220,
  );
  LENGTHS.forEach((length, row) => {
    const first = ROWS.indexOf(row),
      text = `sequence ${row + 1}, A = ${short(view.advantages[row])}`;
    add(svg, "rect", {
      class: "ground",
      x: x(first - 0.45),
      width: x(first + length - 0.55) - x(first - 0.45),
      y: box.top,
      height: box.bottom - box.top,
      rx: 6,
    });
    add(svg, "text", { class: "tick", x: x(first + (length - 1) / 2), y: box.bottom + 16 }, text);
  });
  add(svg, "line", { class: "rule one", x1: box.left, x2: box.right, y1: y(1), y2: y(1) });
  const toValue = (event) => {
    const { top, height } = svg.getBoundingClientRect(),
      pixel = ((event.clientY - top) / height) * 220;
    return REACH[0] * (REACH[1] / REACH[0]) ** ((box.bottom - pixel) / (box.bottom - box.top));
  };
  for (const kind of kinds)
    view[kind].forEach((value, i) => {
      const middle = x(i + (kinds.length > 1 ? (kind === "ratios" ? -0.13 : 0.13) : 0));
      const shape =
        kind === "ratios"
          ? ["circle", { cx: middle, cy: y(value), r: 8 }]
          : ["rect", { x: middle - 7, y: y(value) - 7, width: 14, height: 14, rx: 2 }];
      add(svg, "line", { class: "stem", x1: middle, x2: middle, y1: y(1), y2: y(value) });
      const mark = add(svg, shape[0], {
        ...shape[1],
        class: `mark ${kind}`,
        "data-kind": kind,
        "data-i": i,
        tabindex: 0,
        role: "slider",
        "aria-label": `${MARKS[kind]}, ${tokenName(i)}`,
        "aria-valuemin": REACH[0],
        "aria-valuemax": REACH[1],
        "aria-valuenow": value,
        "aria-orientation": "vertical",
        "aria-valuetext": short(value),
      });
      mark.addEventListener("keydown", (event) => {
        const factor = {
          ArrowUp: 1.02,
          ArrowRight: 1.02,
          ArrowDown: 1 / 1.02,
          ArrowLeft: 1 / 1.02,
          PageUp: 1.2,
          PageDown: 1 / 1.2,
        }[event.key];
        if (factor === undefined && event.key !== "Home") return;
        event.preventDefault();
        moveToken(kind, i, factor === undefined ? 1 : view[kind][i] * factor, true);
      });
      mark.addEventListener("pointerdown", (event) => {
        event.preventDefault();
        const move = (next) => moveToken(kind, i, toValue(next), true);
        const stop = () => {
          removeEventListener("pointermove", move);
          removeEventListener("pointerup", stop);
          removeEventListener("pointercancel", stop);
        };
        addEventListener("pointermove", move);
        addEventListener("pointerup", stop);
        addEventListener("pointercancel", stop);
        mark.focus();
      });
    });
}

// A chart of bars for each loss: the gradient weight of every token.
function drawBars(losses) {
  const holder = $("bars");
  holder.replaceChildren();
  const results = losses.map(({ lines }) => stepResult(lines));
  losses.forEach(({ label, index }, place) => {
    const { loss, weight, kept } = results[place],
      figure = add(holder, "figure", { class: "chart" });
    const caption = add(figure, "figcaption"),
      title = add(caption, "h3");
    add(title, "i", { class: `swatch run${index}` });
    add(title, "span", {}, label);
    add(caption, "span", { class: "quiet" }, `loss of the step ${short(loss)}`);
    const svg = figure.appendChild(document.createElementNS($("token-marks").namespaceURI, "svg"));
    const says = weight.map(
      (w, i) => `${tokenName(i)} ${short(w)}${kept && !kept[i] ? ", rejected" : ""}`,
    );
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `Gradient weights of ${label}: ${says.join("; ")}`);
    const { x, y, box } = frame(
      svg,
      { lo: -0.6, hi: ROWS.length - 0.4, ticks: [] },
      axis([...weight, 0], { count: 3 }),
      120,
    );
    add(svg, "line", { class: "rule one", x1: box.left, x2: box.right, y1: y(0), y2: y(0) });
    weight.forEach((w, i) => {
      const top = Math.min(y(w), y(0)),
        height = Math.abs(y(w) - y(0));
      if (w === 0)
        add(
          svg,
          "text",
          { class: "tick none", x: x(i), y: y(0) - 4 },
          kept && !kept[i] ? "rejected" : "0",
        );
      else
        add(svg, "rect", {
          class: `bar run${index}`,
          x: x(i - 0.3),
          width: x(0.6) - x(0),
          y: top,
          height,
        });
    });
  });
  drawStepTable(losses, results);
}

function drawStepTable(losses, results) {
  const table = $("step-table"),
    [head, body] = [table.tHead, table.tBodies[0]],
    engine = readsEngine(losses);
  head.replaceChildren();
  body.replaceChildren();
  const titles = [
    "token",
    MARKS.ratios,
    ...(engine ? [MARKS.weights] : []),
    ...losses.map(({ label }) => `weight, ${label}`),
  ];
  const top = add(head, "tr");
  titles.forEach((title) => add(top, "th", { scope: "col" }, title));
  ROWS.forEach((_, i) => {
    const row = add(body, "tr");
    add(row, "th", { scope: "row" }, tokenName(i));
    add(row, "td", {}, short(view.ratios[i]));
    if (engine) add(row, "td", {}, short(view.weights[i]));
    for (const { weight, kept } of results)
      add(row, "td", {}, kept && !kept[i] ? `${short(weight[i])} (rejected)` : short(weight[i]));
  });
}
