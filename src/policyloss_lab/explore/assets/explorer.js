// The page as a whole: its state, which is also in the address after #, the editors, the texts.

const THEMES = ["system", "light", "dark"];
// Numbers of the state: how they start, and the ends of their sliders.
const SETTINGS = {
  advantage: [1, 0.1, 3],
  probability: [0.2, 0.01, 0.9],
  rollout: [1, 0.25, 4],
  ref: [1, 0.25, 4],
  teacher: [1, 0.25, 4],
  horizon: [6, 1, 32],
  read: [1.3, 0, 3],
};
const first = () => ({
  losses: DATA.losses.map(({ spec }) => checkedSpec(spec)),
  theme: "system",
  zoom: [0, 3],
  advantages: [1, -1],
  ratios: [...RATIOS],
  weights: [...WEIGHTS],
  ...Object.fromEntries(Object.entries(SETTINGS).map(([name, [start]]) => [name, start])),
});
let view = first(),
  drawn = [];
const opened = new Set();
const NO_CURVE =
  "It compares the tokens of the whole step, so a token alone has no curve; see the small step.";

const labelOf = (spec) => presetsOf(spec)[0] ?? "your own";
const say = (text) => {
  $("status").textContent = text;
};

// The state from the address. Invalid entries are left out, with a message.
function load() {
  const fragment = new URLSearchParams(location.hash.slice(1)),
    next = first(),
    problems = [];
  const numbers = (text, count, [low, high]) => {
    const values = text.split(",").map(Number);
    const fits =
      values.length === count && values.every((v) => Number.isFinite(v) && v >= low && v <= high);
    return text.trim() !== "" && fits ? values : null;
  };
  const losses = fragment
    .getAll("loss")
    .slice(0, DATA.most)
    .flatMap((text) => {
      try {
        if (Object.hasOwn(DATA.presets, text)) return [checkedSpec(DATA.presets[text].spec)];
        return [checkedSpec(JSON.parse(text))];
      } catch (error) {
        problems.push(
          error instanceof SyntaxError
            ? "a loss in it is neither a preset nor JSON."
            : error.message,
        );
        return [];
      }
    });
  if (losses.length) next.losses = losses;
  for (const [name, [, low, high]] of Object.entries(SETTINGS)) {
    const value = fragment.has(name) ? numbers(fragment.get(name), 1, [low, high]) : null;
    if (value) [next[name]] = value;
  }
  for (const [name, ends] of [
    ["ratios", REACH],
    ["weights", REACH],
    ["advantages", [-3, 3]],
  ]) {
    const values = fragment.has(name) ? numbers(fragment.get(name), next[name].length, ends) : null;
    if (values) next[name] = values;
  }
  if (THEMES.includes(fragment.get("theme"))) next.theme = fragment.get("theme");
  const zoom = ZOOMS[Number(fragment.get("zoom") ?? 0)];
  if (zoom) next.zoom = zoom;
  next.read = Math.min(Math.max(next.read, next.zoom[0]), next.zoom[1]);
  view = next;
  say(problems.length ? `The link could not be read as a whole: ${problems[0]}` : "");
}

// The slots of a spec that are not the default: enough to read it back.
function briefSpec(spec) {
  const [preset] = presetsOf(spec);
  if (preset) return preset;
  return JSON.stringify(
    Object.fromEntries(
      Object.entries(spec).filter(([slot, x]) => canonical(x) !== canonical(DATA.default[slot])),
    ),
  );
}

// The address follows the state, but not every step of a drag: browsers limit such changes.
let waiting = 0;
function save() {
  clearTimeout(waiting);
  waiting = setTimeout(saveNow, 100);
}

function saveNow() {
  const start = first(),
    out = new URLSearchParams(view.losses.map((spec) => ["loss", briefSpec(spec)]));
  for (const name of [...Object.keys(SETTINGS), "ratios", "weights", "advantages", "theme"]) {
    if (String(view[name]) !== String(start[name])) out.set(name, view[name]);
  }
  const zoom = ZOOMS.findIndex((ends) => String(ends) === String(view.zoom));
  if (zoom > 0) out.set("zoom", zoom);
  history.replaceState(null, "", `#${out}`);
}

// The drawing of each loss: its lines, its curves, and a note on anything that cannot be shown.
function drawnLosses() {
  const labels = view.losses.map(labelOf);
  return view.losses.map((spec, index) => {
    const lines = formulaOf(spec),
      reads = readsOf(lines),
      twin = labels.indexOf(labels[index]) !== labels.lastIndexOf(labels[index]);
    const label = twin ? `${labels[index]} (${index + 1})` : labels[index],
      loss = { spec, lines, index, label };
    if (needsStep(lines)) return { ...loss, note: NO_CURVE };
    const beside = reads.filter((name) => ["divergence", "entropy"].includes(name));
    const note = beside.length
      ? `the ${beside.join(" and ")} acts on the whole distribution, beside the weight shown here`
      : "";
    return {
      ...loss,
      note,
      partial: beside.length > 0,
      samples: { 1: sampled(lines, 1), [-1]: sampled(lines, -1) },
    };
  });
}

function redraw() {
  document.documentElement.dataset.theme = view.theme;
  $("theme").textContent = `Theme: ${view.theme}`;
  $("add").disabled = view.losses.length >= DATA.most;
  drawn = drawnLosses();
  drawWritten(drawn);
  redrawReading();
  redrawStep();
}

// Redraw the parts of the page that a reading or a token changes; the losses stay the same.
function redrawReading() {
  drawCurves(drawn);
  drawReading(drawn);
  save();
}

function redrawStep() {
  drawTokens(drawn);
  drawBars(drawn);
  save();
}

function setReading(ratio) {
  view.read = Number(ratio.toPrecision(6));
  redrawReading();
}

// Change a loss, if the change fits; otherwise show the reason in its card.
function editLoss(index, path, value, rebuild) {
  const problems = [];
  let spec = null;
  for (const changed of possibleChanges(view.losses[index], path, value)) {
    try {
      spec = checkedSpec(changed);
      break;
    } catch (error) {
      problems.push(error.message);
      if (!rebuild) break;
    }
  }
  const card = document.querySelector(`#editors [data-index="${index}"]`);
  card.querySelector(".problem").textContent = spec ? "" : problems[0];
  if (!spec) return false;
  view.losses[index] = spec;
  if (rebuild) rebuildEditors();
  else showPreset(card, index);
  rebuildSettings();
  redraw();
  return true;
}

// The preset of a card's loss.
function showPreset(card, index) {
  const [preset] = presetsOf(view.losses[index]),
    about = DATA.presets[preset];
  card.querySelector("select").value = preset ?? "";
  const text = about ? `${about.title}. ${about.paper}` : "A composition of your own.";
  card.querySelector(".title").textContent = text;
}

function rebuildEditors() {
  const active = document.activeElement?.id,
    holder = $("editors");
  holder.replaceChildren();
  view.losses.forEach((spec, index) => {
    const card = add(holder, "div", { class: "card", "data-index": index }),
      head = add(card, "div", { class: "pick" });
    add(head, "i", { class: `swatch run${index}` });
    add(head, "label", { for: `preset-${index}` }, `Loss ${index + 1}`);
    const select = add(head, "select", { id: `preset-${index}` });
    add(select, "option", { value: "" }, "your own");
    for (const name of Object.keys(DATA.presets)) add(select, "option", { value: name }, name);
    select.addEventListener("change", () => {
      if (select.value) view.losses[index] = checkedSpec(DATA.presets[select.value].spec);
      rebuild();
    });
    if (view.losses.length > 1) {
      const remove = add(
        head,
        "button",
        { type: "button", "aria-label": `Remove loss ${index + 1}` },
        "×",
      );
      remove.addEventListener("click", () => {
        view.losses.splice(index, 1);
        rebuild();
        $("preset-0").focus();
      });
    }
    add(card, "p", { class: "quiet title" });
    showPreset(card, index);
    add(card, "p", { class: "problem", role: "alert" });
    const details = add(card, "details");
    details.open = opened.has(index);
    add(details, "summary", {}, "Its parts and numbers");
    details.addEventListener("toggle", () => {
      if (details.open) opened.add(index);
      else opened.delete(index);
    });
    specControls(details, spec, `loss-${index}`, (path, value, again) =>
      editLoss(index, path, value, again),
    );
  });
  if (active) $(active)?.focus();
}

// The sliders of the inputs of the losses other than the ratio.
function rebuildSettings() {
  const reads = new Set(view.losses.flatMap((spec) => readsOf(formulaOf(spec))));
  const wanted = [
    ["advantage", "size of the advantage", "token"],
    ["probability", "π_old of the token", "token"],
    ...POLICIES.filter(([argument]) => reads.has(argument)).map(([, name, label]) => [
      name,
      label,
      "token",
    ]),
    ...(view.losses.some((spec) => spec.aggregate.horizon === null)
      ? [["horizon", "horizon, in tokens", "step"]]
      : []),
  ];
  const key = wanted.map(([name]) => name).join();
  if ($("token-settings").dataset.key === key) return;
  $("token-settings").dataset.key = key;
  for (const id of ["token-settings", "step-settings"]) $(id).replaceChildren();
  for (const [name, label, where] of wanted) {
    const [, low, high] = SETTINGS[name];
    numberControl($(`${where}-settings`), {
      id: `set-${name}`,
      label,
      low,
      high,
      value: view[name],
      least: low,
      most: high,
      change: (x) => {
        if (!(x >= low && x <= high)) return false;
        view[name] = x;
        redraw();
        return true;
      },
    });
  }
  selectControl($("token-settings"), {
    id: "set-zoom",
    label: "range of the ratio",
    value: String(ZOOMS.findIndex((ends) => String(ends) === String(view.zoom))),
    options: ZOOMS.map(([low, high], i) => [String(i), `${low} to ${high}`]),
    change: (i) => {
      view.zoom = ZOOMS[i];
      view.read = Math.min(Math.max(view.read, view.zoom[0]), view.zoom[1]);
      redraw();
      return true;
    },
  });
  view.advantages.forEach((value, row) =>
    numberControl($("step-settings"), {
      id: `set-advantage-${row}`,
      label: `advantage of sequence ${row + 1}`,
      low: -3,
      high: 3,
      value,
      least: -3,
      most: 3,
      change: (x) => {
        if (!(Math.abs(x) <= 3)) return false;
        view.advantages[row] = x;
        redraw();
        return true;
      },
    }),
  );
  const reset = add(
    $("step-settings"),
    "button",
    { type: "button", id: "reset-tokens" },
    "Put all ratios to 1",
  );
  reset.addEventListener("click", () => {
    view.ratios = view.ratios.map(() => 1);
    view.weights = view.weights.map(() => 1);
    redraw();
  });
}

function rebuild() {
  rebuildEditors();
  rebuildSettings();
  redraw();
}

$("add").addEventListener("click", () => {
  view.losses.push(clone(view.losses.at(-1)));
  rebuild();
  $(`preset-${view.losses.length - 1}`).focus();
});
$("copy-link").addEventListener("click", () => {
  saveNow();
  copy(location.href, "Link");
});
$("theme").addEventListener("click", () => {
  view.theme = THEMES[(THEMES.indexOf(view.theme) + 1) % 3];
  redraw();
});
$("read-at").addEventListener("input", (event) => setReading(Number(event.target.value)));
const reload = () => {
  load();
  $("token-settings").dataset.key = "";
  rebuild();
};
addEventListener("hashchange", reload);
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnWidth) {
    drawnWidth = innerWidth;
    redraw();
  }
});
reload();

// For the console and for tests: the computations of the page, on data that it checks first.
globalThis.policyloss = Object.freeze({
  check: (data) => checkedSpec(data),
  formula: (data) =>
    formulaOf(checkedSpec(data)).map(([name, x]) => `${name} = ${expressionText(x)}`),
  evaluate: (data, step) => {
    const result = evaluate(formulaOf(checkedSpec(data)), step);
    const gradients = ["logp", "entropy", "divergence"].map((name) => [
      name,
      result.gradient(name),
    ]);
    return { loss: result.value("loss"), ...Object.fromEntries(gradients) };
  },
  python: (data) => pythonOf(checkedSpec(data)),
  elsewhere: (data) => elsewhereOf(checkedSpec(data)).map(({ part, what }) => [part, what]),
});
