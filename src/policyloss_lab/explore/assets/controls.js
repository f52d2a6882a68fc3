// The controls of a loss: native inputs for every slot, part and number, made from the parts' data.

const SLOT_TITLES = {
  ratio: "Ratio",
  trust: "Trust region",
  correction: "Rollout correction",
  kl: "KL",
  aggregate: "Aggregation",
};

// A round number near `raw`: 1, 2 or 5 times a power of ten.
function roundStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return Number((power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999)).toPrecision(1));
}

// A row with a slider and a box for the exact number. change: called with the new number.
function numberControl(parent, { id, label, low, high, value, change, least, most }) {
  const row = add(parent, "div", { class: "control" }),
    step = roundStep((high - low) / 200);
  add(row, "label", { for: id }, label);
  const slider = add(row, "input", { type: "range", id, min: low, max: high, step });
  const box = add(row, "input", {
    type: "number",
    id: `${id}-exact`,
    step: "any",
    "aria-label": `${label}, exact value`,
  });
  if (least !== undefined) box.min = least;
  if (most !== undefined) box.max = most;
  slider.value = box.value = value;
  slider.addEventListener("input", () => {
    if (change(Number(slider.value))) box.value = slider.value;
    else slider.value = box.value;
  });
  box.addEventListener("change", () => {
    const ok = box.value !== "" && change(Number(box.value));
    box.setAttribute("aria-invalid", String(!ok));
    if (ok) slider.value = box.value;
  });
  return row;
}

function selectControl(parent, { id, label, options, value, change }) {
  const row = add(parent, "div", { class: "control" });
  add(row, "label", { for: id }, label);
  const select = add(row, "select", { id });
  for (const [word, text] of options) add(select, "option", { value: word }, text);
  select.value = value;
  select.addEventListener("change", () => {
    if (!change(select.value)) select.value = value;
  });
  return row;
}

function checkControl(parent, { id, label, value, change }) {
  const holder = add(parent, "label", { class: "check", for: id });
  const box = add(holder, "input", { type: "checkbox", id });
  box.checked = value;
  add(holder, "span", {}, label);
  box.addEventListener("change", () => {
    if (!change(box.checked)) box.checked = value;
  });
}

// A field of a part at `path` of the spec. edit(path, value, rebuild): change the spec, if it fits.
function fieldControl(parent, slot, part, field, path, prefix, edit) {
  const id = `${prefix}-${path.join("-")}`,
    label = field.name,
    value = part[field.name];
  const put = (x, rebuild) => edit(path, x, rebuild);
  if (field.kind === "part") {
    const group = add(parent, "fieldset", { class: "inner" });
    add(group, "legend", {}, label);
    partControls(group, slot, value, path, prefix, edit);
  } else if (field.kind === "choice") {
    selectControl(parent, {
      id,
      label,
      value: JSON.stringify(value),
      options: field.options.map((option) => [JSON.stringify(option), String(option ?? "none")]),
      change: (text) => put(JSON.parse(text), true),
    });
  } else if (Array.isArray(value)) {
    const ends = value.map((x) => (x === null ? "none" : short(number(x)))).join(" to ");
    add(add(parent, "p", { class: "quiet" }), "span", {}, `${label}: ${ends}`);
  } else {
    const absent = value === null || value === "inf",
      none = field.kind === "clamp" || field.optional;
    if (!absent) {
      const [low, high] = field.slider,
        reach = Math.max(high, value),
        step = roundStep((high - low) / 200);
      numberControl(parent, {
        id,
        label,
        value,
        least: field.least,
        most: field.most,
        high: reach,
        low: Math.min(low + (field.above === undefined ? 0 : step), value),
        change: (x) => put(field.integer ? Math.round(x) : x, false),
      });
    }
    if (none || field.infinite) {
      const off = none ? null : "inf";
      checkControl(parent, {
        id: `${id}-off`,
        label: `${label}: ${none ? "none" : "no bound"}`,
        value: absent,
        change: (checked) => put(checked ? off : field.start, true),
      });
    }
  }
}

// The choice of a part, and its fields. none: the word for no part, where there may be none.
function partControls(parent, slot, part, path, prefix, edit, none) {
  const parts = DATA.slots[slot],
    id = `${prefix}-${path.join("-")}`;
  const options = Object.keys(parts).map((type) => [type, type]);
  selectControl(parent, {
    id,
    label: "part",
    value: part?.type ?? "",
    options: none ? [["", none], ...options] : options,
    change: (type) => edit(path, type === "" ? null : clone(parts[type].start), true),
  });
  if (!part) return;
  add(parent, "p", { class: "quiet about" }, parts[part.type].about.replaceAll("`", ""));
  for (const field of parts[part.type].fields) {
    fieldControl(parent, slot, part, field, [...path, field.name], prefix, edit);
  }
}

// The parts of a slot that may hold several, and one empty place for another.
function listControls(parent, slot, parts, most, prefix, edit) {
  const places = parts.length < most ? [...parts, null] : parts;
  places.forEach((part, i) => {
    const group = add(parent, "div", { class: "inner" });
    const none = part ? "remove it" : i ? "add another" : "none";
    partControls(group, slot, part, [slot, i], prefix, edit, none);
  });
}

// All controls of one spec. Lists are edited as lists, whatever form the data has.
function specControls(parent, spec, prefix, edit) {
  for (const [slot, title] of Object.entries(SLOT_TITLES)) {
    const group = add(parent, "fieldset");
    add(group, "legend", {}, title);
    if (slot === "correction") {
      listControls(group, slot, spec.correction, MOST_CORRECTIONS, prefix, edit);
      if (spec.correction.length)
        selectControl(group, {
          id: `${prefix}-rejected`,
          label: "rejected",
          value: spec.rejected,
          options: Object.keys(DATA.joints.rejected).map((way) => [way, way]),
          change: (way) => edit(["rejected"], way, true),
        });
    } else if (slot === "kl") {
      listControls(group, slot, pullsOf(spec), 2, prefix, edit);
      const [low, high] = DATA.entropy_coef.slider;
      numberControl(group, {
        id: `${prefix}-entropy_coef`,
        label: "entropy_coef",
        low,
        high,
        value: spec.entropy_coef,
        change: (x) => edit(["entropy_coef"], x, false),
      });
    } else partControls(group, slot, spec[slot], [slot], prefix, edit);
  }
}

// A copy of `spec` with `value` at `path`; null takes a part out of a list.
function withValue(spec, path, value) {
  const changed = { ...clone(spec), kl: clone(pullsOf(spec)) };
  let owner = changed;
  for (const key of path.slice(0, -1)) owner = owner[key];
  const last = path.at(-1);
  if (Array.isArray(owner) && value === null) owner.splice(last, 1);
  else owner[last] = value;
  if (!changed.correction.length) changed.rejected = "keep";
  return changed;
}

// Changes to try one after the other: the change alone, then with another number of the same part
// switched on or off, because some choices need a number, and others forbid one.
function* possibleChanges(spec, path, value) {
  const changed = withValue(spec, path, value);
  yield changed;
  const owner = path.slice(0, -1).reduce((part, key) => part[key], changed);
  if (!owner?.type) return;
  const { fields } = DATA.slots[path[0]][owner.type];
  for (const { name, optional, start } of fields) {
    if (!optional || name === path.at(-1)) continue;
    yield withValue(changed, [...path.slice(0, -1), name], owner[name] === null ? start : null);
  }
}
