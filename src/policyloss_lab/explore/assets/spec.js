// Specs: the data of `LossSpec.to_dict`. A spec is checked first, then turned into a formula from
// the lines of its parts, and written as Python and in frameworks' words.

const RATIO_ANCHOR = "anchor of the ratio";
const MOST_CORRECTIONS = 4;
const clone = (x) => JSON.parse(JSON.stringify(x));
const number = (x) => (x === "inf" ? Infinity : x === "-inf" ? -Infinity : x);
const plainNumber = (x) => (Number.isFinite(x) ? x : x > 0 ? "inf" : "-inf");
const isRecord = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const fail = (message) => {
  throw new Error(message);
};
const shown = (x) => (JSON.stringify(x) ?? String(x)).slice(0, 60);

// A number within the limits of its field.
function checkedNumber(called, field, data) {
  const x = number(data);
  if (x === null && field.optional) return null;
  if (typeof x !== "number" || Number.isNaN(x))
    fail(`${called} must be a number, got ${shown(data)}.`);
  const wrong = (sign, limit) => fail(`${called} must be ${sign} ${limit}, got ${shown(data)}.`);
  if (field.least !== undefined && x < field.least) wrong("at least", field.least);
  if (field.above !== undefined && x <= field.above) wrong("above", field.above);
  if (x === Infinity && field.infinite) return "inf";
  if (!Number.isFinite(x)) fail(`${called} must be finite.`);
  if (field.most !== undefined && x > field.most) wrong("at most", field.most);
  if (field.below !== undefined && x >= field.below) wrong("below", field.below);
  if (field.integer && !Number.isInteger(x))
    fail(`${called} must be an integer, got ${shown(data)}.`);
  return x;
}

function checkedClamp(called, field, data) {
  if (data === null) return null;
  if (!Array.isArray(data)) return checkedNumber(called, { above: 0, infinite: true }, data);
  const fits = (x) => x === null || (typeof number(x) === "number" && !Number.isNaN(number(x)));
  const [low, high] = data.map((x) => (x === null ? null : number(x)));
  const ordered = low === null || high === null || low < high;
  if (data.length !== 2 || !data.every(fits) || !ordered) {
    fail(`${called} must be a pair (low, high), got ${shown(data)}.`);
  }
  return [low, high].map((x) => (x === null ? null : plainNumber(x)));
}

// A part with all of its fields, checked; the data itself is not kept.
function checkedPart(slot, data, depth = 0) {
  if (!isRecord(data) || !Object.hasOwn(data, "type")) {
    fail(`the ${slot} slot must hold a part with a "type", got ${shown(data)}.`);
  }
  const { type } = data,
    parts = DATA.slots[slot];
  if (typeof type !== "string" || !Object.hasOwn(parts, type)) {
    fail(`${shown(type)} is no part of the ${slot} slot that this page knows.`);
  }
  const { fields } = parts[type];
  for (const key of Object.keys(data)) {
    if (key !== "type" && !fields.some((field) => field.name === key)) {
      fail(`${type} has no field ${shown(key)}.`);
    }
  }
  const part = { type };
  for (const field of fields) {
    const called = `${type}.${field.name}`,
      has = Object.hasOwn(data, field.name);
    if (!has && !Object.hasOwn(field, "default")) fail(`${type} needs ${field.name}.`);
    const value = has ? data[field.name] : clone(field.default);
    if (field.kind === "part") {
      if (depth > 3) fail("parts are nested too deeply.");
      part[field.name] = checkedPart(slot, value, depth + 1);
    } else if (field.kind === "choice") {
      if (!field.options.includes(value))
        fail(
          `${called} must be one of ${field.options.map(String).join(", ")}; got ${shown(value)}.`,
        );
      part[field.name] = value;
    } else {
      part[field.name] = (field.kind === "clamp" ? checkedClamp : checkedNumber)(
        called,
        field,
        value,
      );
    }
  }
  for (const { name, not_below: low } of fields) {
    if (
      low &&
      part[name] !== null &&
      part[low] !== null &&
      number(part[low]) > number(part[name])
    ) {
      fail(`${type}: ${low} is above ${name}.`);
    }
  }
  return part;
}

// A complete spec, checked; raises an error that names the problem.
function checkedSpec(data) {
  if (!isRecord(data)) fail(`a loss must be an object, got ${shown(data)}.`);
  for (const key of Object.keys(data)) {
    if (!Object.hasOwn(DATA.default, key)) fail(`a loss has no slot ${shown(key)}.`);
  }
  const slot = (name) => (Object.hasOwn(data, name) ? data[name] : clone(DATA.default[name]));
  const list = (name, x, most) => {
    if (!Array.isArray(x) || x.length > most)
      fail(`${name} must be a list of at most ${most} parts.`);
    return x.map((part) => checkedPart(name, part));
  };
  const pulls = slot("kl") ?? [];
  const spec = {
    ratio: checkedPart("ratio", slot("ratio")),
    trust: checkedPart("trust", slot("trust")),
    correction: list("correction", slot("correction"), MOST_CORRECTIONS),
    rejected: slot("rejected"),
    kl: list("kl", Array.isArray(pulls) ? pulls : [pulls], 2),
    entropy_coef: checkedNumber("entropy_coef", DATA.entropy_coef, slot("entropy_coef")),
    aggregate: checkedPart("aggregate", slot("aggregate")),
  };
  if (!Object.hasOwn(DATA.joints.rejected, String(spec.rejected))) {
    fail(`rejected must be one of ${Object.keys(DATA.joints.rejected).join(", ")}.`);
  }
  checkFit(spec);
  if (spec.kl.length < 2) spec.kl = spec.kl[0] ?? null;
  return spec;
}

// Whether the parts fit together; `LossSpec` refuses the same.
function checkFit(spec) {
  const anchor = spec.ratio.anchor;
  const variants = (slot, parts) => parts.map((part) => variantOf(slot, part, anchor));
  const trusts = (part) => [
    part,
    ...DATA.slots.trust[part.type].fields
      .filter((field) => field.kind === "part")
      .flatMap((field) => trusts(part[field.name])),
  ];
  for (const { type } of trusts(spec.trust)) {
    const refusal = DATA.unfit_ratios[type]?.[spec.ratio.type];
    if (refusal) fail(refusal);
  }
  const ranks = (lines) =>
    lines.some(([, place]) => expressionText(expressionAt(place)).includes("kth_largest"));
  const ranking = variants("trust", trusts(spec.trust)).filter(({ lines }) => ranks(lines));
  if (ranking.length > 1) fail("only one side of BySign may choose tokens of the whole step.");
  const { correction } = spec,
    normalising = correction.filter(isNormalising);
  const has =
    (result) =>
    ({ lines }) =>
      lines.some(([name]) => name === result);
  // The weight of Stale is no importance weight.
  const weighing = variants(
    "correction",
    correction.filter((part) => !isNormalising(part) && part.type !== "Stale"),
  ).filter(has("weight"));
  if (weighing.length > 1)
    fail("two corrections would both multiply by the importance weight; keep one.");
  if (normalising.length > 1 || (normalising.length && !weighing.length)) {
    fail("SelfNormalise normalises one weight: put it once, beside a correction that weights.");
  }
  if (spec.rejected !== "keep" && !correction.length) {
    fail(`rejected=${shown(spec.rejected)} has no effect without a correction.`);
  }
  const pulls = pullsOf(spec);
  if (pulls.filter((part) => part.type === "Divergence").length > 1)
    fail("a loss has one Divergence at most.");
  variants("ratio", [spec.ratio]);
  variants("kl", pulls);
  variants("aggregate", [spec.aggregate]);
}

const isNormalising = (part) => part.type === "SelfNormalise";
const pullsOf = (spec) => (Array.isArray(spec.kl) ? spec.kl : spec.kl === null ? [] : [spec.kl]);

// The variant of a part for its choices. An infinite bound of an optional field counts as None, if
// the part may omit it.
function variantOf(slot, part, anchor) {
  const { keys, variants, fields } = DATA.slots[slot][part.type];
  const variant = (infinite) => {
    let place = 0;
    for (const [key, options] of keys) {
      let value = key === RATIO_ANCHOR ? anchor : part[key];
      if (value === "inf") value = infinite;
      else if (fields.some(({ name, kind }) => name === key && kind === "number") && value !== null)
        value = "number";
      place = place * options.length + options.indexOf(value);
    }
    return DATA.variants[variants[place]];
  };
  const { error } = variant("number"),
    unbounded = variant(null);
  if (error) fail(error);
  return unbounded.error ? variant("number") : unbounded;
}

// The numbers of a part by the names of its parameters.
function parametersOf(slot, part) {
  const numbers = {};
  for (const { name, kind } of DATA.slots[slot][part.type].fields) {
    const value = part[name];
    if (kind === "number") numbers[name] = number(value);
    if (kind !== "clamp") continue;
    const [low, high] = Array.isArray(value)
      ? value.map(number)
      : value === null
        ? [null, null]
        : [-number(value), number(value)];
    numbers[`${name}.low`] = low ?? -Infinity;
    numbers[`${name}.high`] = high ?? Infinity;
  }
  return numbers;
}

// The lines of one part. A part made of parts has the lines of each, which end in its field's name.
function linesOf(slot, part, anchor) {
  const { lines } = variantOf(slot, part, anchor),
    parameters = parametersOf(slot, part);
  const inner = DATA.slots[slot][part.type].fields.filter((field) => field.kind === "part");
  const before = inner.flatMap(({ name }) => {
    const inside = linesOf(slot, part[name], anchor);
    const renamed = Object.fromEntries(
      inside.map(([label], i) => [label, i < inside.length - 1 ? `${label}_${name}` : name]),
    );
    return inside.map(([label, x]) => [renamed[label], renameIn(x, renamed)]);
  });
  return [...before, ...lines.map(([label, place]) => [label, expressionAt(place, parameters)])];
}

const renameIn = (x, names) => {
  if (Array.isArray(x)) return [x[0], ...x.slice(1).map((y) => renameIn(y, names))];
  return typeof x === "string" && Object.hasOwn(names, x) ? names[x] : x;
};

// The formula of a spec: lines [name, expression], the last of which is the loss.
function formulaOf(spec) {
  const anchor = spec.ratio.anchor,
    lines = [],
    written = new Set();
  const join = (pieces, names = {}, numbers = {}) => {
    for (const [label, place] of pieces) lines.push([label, expressionAt(place, numbers, names)]);
  };
  for (const part of spec.correction.filter((each) => !isNormalising(each))) {
    for (const [label, x] of linesOf("correction", part, anchor)) {
      if (label === "log_weight" && written.has(label)) continue;
      if (["weight", "keep"].includes(label) && written.has(label))
        join(DATA.joints[label], { [`${label}_2`]: x });
      else lines.push([label, x]);
      written.add(label);
    }
  }
  const rejects = written.has("keep"),
    weighs = written.has("weight");
  if (rejects) join(DATA.joints.rejected[spec.rejected]);
  for (const { over } of spec.correction.filter(isNormalising))
    join(DATA.joints.normalised[`${over},${Number(rejects)}`]);
  lines.push(...linesOf("ratio", spec.ratio, anchor), ...linesOf("trust", spec.trust, anchor));
  const pulls = pullsOf(spec),
    numbers = { entropy_coef: spec.entropy_coef };
  pulls.forEach((part, i) => {
    const called = i ? `kl_${i + 1}` : "kl";
    lines.push(
      ...linesOf("kl", part, anchor).map(([label, x]) => [label === "kl" ? called : label, x]),
    );
    numbers[`${called}.coef`] = part.coef;
  });
  const key = [weighs, rejects && spec.rejected === "keep", pulls.length, spec.entropy_coef !== 0];
  const sum = DATA.joints.token_loss[key.map(Number).join(",")];
  join(sum, {}, numbers);
  const averaged = sum.length ? { surrogate: "token_loss" } : {};
  lines.push(
    ...linesOf("aggregate", spec.aggregate, anchor).map(([label, x]) => [
      label,
      renameIn(x, averaged),
    ]),
  );
  return needed(lines);
}

const namesIn = (x) =>
  Array.isArray(x) ? x.slice(1).flatMap(namesIn) : typeof x === "string" ? [x] : [];

// The lines that the loss depends on. Every sum and count reads the mask, though it is not printed.
function needed(lines) {
  const wanted = new Set(["loss"]),
    kept = [];
  for (const [label, x] of [...lines].reverse()) {
    if (!wanted.has(label) && label !== "mask") continue;
    wanted.delete(label);
    namesIn(x).forEach((name) => wanted.add(name));
    kept.unshift([label, x]);
  }
  return kept;
}

// The inputs of a formula.
function readsOf(lines) {
  const inputs = [
    "logp",
    "old_logp",
    "rollout_logp",
    "ref_logp",
    "teacher_logp",
    "ages",
    "entropy",
    "divergence",
  ];
  const names = new Set(lines.flatMap(([, x]) => namesIn(x)));
  return inputs.filter((name) => names.has(name));
}

// Whether a token's loss depends on numbers of the whole step.
const STEP_WORDS = ["token_mean", "kth_largest", "budget_bound", "sum"];
const rankedWords = (x) =>
  Array.isArray(x) && (STEP_WORDS.includes(x[0]) || x.some(rankedWords));
const needsStep = (lines) => lines.some(([label, x]) => label !== "loss" && rankedWords(x));

// The presets that equal this spec.
const canonical = (x) =>
  JSON.stringify(x, (_, value) =>
    isRecord(value) ? Object.fromEntries(Object.entries(value).sort()) : value,
  );
const PRESET_TEXTS = Object.entries(DATA.presets).map(([name, { spec }]) => [
  canonical(spec),
  name,
]);
const presetsOf = (spec) => {
  const text = canonical(spec);
  return PRESET_TEXTS.filter(([each]) => each === text).map(([, name]) => name);
};
