// A loss as text: its formula, Python, and the names of its parts in frameworks.

const pythonValue = (x) => {
  if (x === null) return "None";
  if (typeof x === "boolean") return x ? "True" : "False";
  if (x === "inf" || x === "-inf") return `${x === "inf" ? "" : "-"}math.inf`;
  if (Array.isArray(x)) return `(${x.map(pythonValue).join(", ")})`;
  return typeof x === "number" ? numberText(x) : JSON.stringify(x);
};

function pythonPart(slot, part) {
  const options = DATA.slots[slot][part.type].fields
    .filter(
      (field) =>
        !Object.hasOwn(field, "default") ||
        canonical(field.default) !== canonical(part[field.name]),
    )
    .map(
      ({ name, kind }) =>
        `${name}=${kind === "part" ? pythonPart(slot, part[name]) : pythonValue(part[name])}`,
    );
  return `pl.${part.type}(${options.join(", ")})`;
}

// The spec as Python: the name of a preset, or every slot that is not the default.
function pythonOf(spec) {
  const [preset] = presetsOf(spec);
  const several = (slot, parts) => {
    const texts = parts.map((part) => pythonPart(slot, part));
    return texts.length === 1 ? texts[0] : `(${texts.join(", ")})`;
  };
  const textOf = (slot) => {
    if (slot === "correction") return several(slot, spec.correction);
    if (slot === "kl") return several(slot, pullsOf(spec));
    return isRecord(spec[slot]) ? pythonPart(slot, spec[slot]) : pythonValue(spec[slot]);
  };
  const changed = (slot) => canonical(spec[slot]) !== canonical(DATA.default[slot]);
  const slots = Object.keys(DATA.default)
    .filter(changed)
    .map((slot) => `    ${slot}=${textOf(slot)},\n`);
  const written = slots.length ? `pl.LossSpec(\n${slots.join("")})` : "pl.LossSpec()";
  const code = preset ? `pl.preset(${JSON.stringify(preset)})` : written;
  const imports = code.includes("math.inf") ? "import math\n\n" : "";
  return `${imports}import policyloss as pl\n\nspec = ${code}\n`;
}

// The names of a spec's parts in frameworks: the entries with matching traits.
function elsewhereOf(spec) {
  const [preset] = presetsOf(spec);
  if (preset) return DATA.presets[preset].elsewhere.map((i) => DATA.elsewhere[i]);
  const words = new Set(spec.entropy_coef ? ["entropy"] : []);
  const parts = {
    ratio: [spec.ratio],
    trust: [spec.trust],
    correction: spec.correction,
    kl: pullsOf(spec),
    aggregate: [spec.aggregate],
  };
  for (const [slot, list] of Object.entries(parts))
    for (const part of list) {
      variantOf(slot, part, spec.ratio.anchor).words.forEach((word) => words.add(word));
      for (const [field, more] of Object.entries(DATA.slots[slot][part.type].words_if_infinite)) {
        if (part[field] === "inf") more.forEach((word) => words.add(word));
      }
    }
  const holds = (need) => (need.startsWith("-") ? !words.has(need.slice(1)) : words.has(need));
  return DATA.elsewhere.filter(({ needs }) => needs.every(holds));
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied.`);
  } catch {
    const instead = what === "Link" ? "the address bar holds the link" : "select the text instead";
    say(`This browser does not let a page copy; ${instead}.`);
  }
}

// The names of a loss in frameworks, one row for each framework, and the parts without a name.
function namesTable(parent, spec) {
  const entries = elsewhereOf(spec),
    counts = new Map();
  for (const { names } of entries)
    for (const who of Object.keys(names)) counts.set(who, (counts.get(who) ?? 0) + 1);
  const body = add(
    add(add(parent, "div", { class: "wide" }), "table", { class: "settings" }),
    "tbody",
  );
  for (const who of [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a))) {
    const row = add(body, "tr"),
      cell = (add(row, "th", { scope: "row" }, who), add(row, "td"));
    for (const { part, names } of entries)
      if (names[who]) add(cell, "div", {}, `${part}: ${names[who]}`);
    const missing = entries.filter(({ names }) => !names[who]).map(({ part }) => part);
    if (missing.length)
      add(cell, "div", { class: "quiet" }, `no name known for: ${missing.join(", ")}`);
  }
  const known = new Set(entries.map(({ part }) => part));
  const nameless = [
    ["trust", "surrogate"],
    ["correction", "correction"],
    ["kl", "KL"],
    ["aggregate", "aggregate"],
  ]
    .filter(([slot, part]) => spec[slot] !== null && spec[slot].length !== 0 && !known.has(part))
    .map(([, part]) => part);
  if (nameless.length)
    add(
      parent,
      "p",
      { class: "quiet" },
      `No name is known in any framework for: ${nameless.join(", ")}.`,
    );
}

function drawWritten(losses) {
  const holder = $("written"),
    wasOpen = [...holder.querySelectorAll("details")].map((details) => details.open);
  holder.replaceChildren();
  losses.forEach(({ spec, lines, label, index }, place) => {
    const card = add(holder, "div", { class: "card" }),
      title = add(card, "h3"),
      [preset] = presetsOf(spec);
    add(title, "i", { class: `swatch run${index}` });
    add(title, "span", {}, label);
    const formula = preset
      ? DATA.presets[preset].formula
      : lines.map(([name, x]) => `${name} = ${expressionText(x)}`).join("\n");
    const pre = add(card, "pre", { class: "formula", tabindex: 0 });
    for (const line of formula.split("\n")) add(pre, "span", {}, line);
    const used = new Set(formula.match(/[A-Za-z_]\w*/g)),
      words = Object.keys(DATA.vocabulary).filter((word) => used.has(word));
    if (words.length)
      add(
        card,
        "p",
        { class: "quiet" },
        `${words.map((word) => DATA.vocabulary[word]).join("; ")}.`,
      );
    const python = pythonOf(spec);
    add(card, "pre", { class: "python", tabindex: 0 }, python);
    const button = add(card, "button", { type: "button" }, "Copy the Python");
    button.addEventListener("click", () => copy(python, "Python"));
    if (preset && DATA.presets[preset].note)
      add(card, "p", { class: "quiet" }, DATA.presets[preset].note);
    const details = add(card, "details");
    details.open = wasOpen[place] ?? false;
    add(details, "summary", {}, "In frameworks");
    namesTable(details, spec);
  });
}
