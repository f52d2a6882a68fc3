// Formulas: evaluated with their gradient, and printed. Nothing here depends on a loss: these are
// the operators and words of the printed formulas, and the slope of each, as in autograd.
// An expression is a name, a number, True or False, or [operator, …arguments].

// The value of each operator for one token, and its slope in each argument.
const half = (a, b) => (a === b ? 0.5 : 0);
const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const SMOOTH = {
  "+": [(a, b) => a + b, () => [1, 1]],
  "-": [(a, b) => a - b, () => [1, -1]],
  "*": [(a, b) => a * b, (a, b) => [b, a]],
  "/": [(a, b) => a / b, (a, b) => [1 / b, -a / (b * b)]],
  "**": [(a, b) => a ** b, (a, b) => [b === 0 ? 0 : b * a ** (b - 1), 0]],
  negative: [(x) => -x, () => [-1]],
  exp: [Math.exp, (x) => [Math.exp(x)]],
  log: [Math.log, (x) => [1 / x]],
  abs: [Math.abs, (x) => [Math.sign(x)]],
  sigmoid: [sigmoid, (x) => [sigmoid(x) * sigmoid(-x)]],
  sign: [Math.sign, () => [0]],
  floor: [Math.floor, () => [0]],
  max: [Math.max, (a, b) => [a > b ? 1 : half(a, b), b > a ? 1 : half(a, b)]],
  min: [Math.min, (a, b) => [a < b ? 1 : half(a, b), b < a ? 1 : half(a, b)]],
  clip: [(x, a, b) => Math.min(Math.max(x, a), b), (x, a, b) => [x >= a && x <= b ? 1 : 0, 0, 0]],
  where: [(c, a, b) => (c ? a : b), (c) => [0, c ? 1 : 0, c ? 0 : 1]],
};
const TESTS = {
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
  "==": (a, b) => a === b,
  "!=": (a, b) => a !== b,
  "&": (a, b) => a && b,
  "|": (a, b) => a || b,
  "~": (a) => !a,
};
const at = (value, i) => (Array.isArray(value) ? value[i] : value);

// The value for every token, or one value if no argument has several.
function each(size, values, compute) {
  if (!values.some(Array.isArray)) return compute(...values);
  return Array.from({ length: size }, (_, i) => compute(...values.map((v) => at(v, i))));
}

// The lines on the tokens of a step: every value by its name, and the gradient of `of`.
// step: for each name an array with one entry per token; `row`, `column` and `group` give the place
// of a token. Only valid tokens exist; a formula may narrow the mask.
function evaluate(lines, step, of = "loss") {
  const size = step.row.length,
    tape = [],
    names = new Map();
  const leaf = (value, carries = false) => ({ value, carries, parents: [], slope: null });
  for (const [name, value] of Object.entries(step)) {
    names.set(name, leaf(value, ["logp", "entropy", "divergence"].includes(name)));
  }
  names.set("mask", leaf(Array(size).fill(true)));
  const mask = () => names.get("mask").value;

  // parents: pairs of a node and a function from this node's gradient to that node's.
  const record = (value, parents) => {
    const carrying = parents.filter(([parent]) => parent.carries);
    const node = { value, carries: carrying.length > 0, parents: carrying, slope: null };
    tape.push(node);
    return node;
  };
  const pointwise = ([compute, slopes], nodes) => {
    const values = nodes.map((node) => node.value);
    const back = (k) => (g) => {
      const product = (i) => {
        const slope = at(g, i);
        return slope === 0 ? 0 : slope * slopes(...values.map((v) => at(v, i)))[k];
      };
      if (!Array.isArray(g)) return product(0);
      const all = Array.from({ length: size }, (_, i) => product(i));
      return Array.isArray(values[k]) ? all : all.reduce((a, b) => a + b, 0);
    };
    return record(
      each(size, values, compute),
      nodes.map((node, k) => [node, back(k)]),
    );
  };

  // Sums over the tokens of the mask that share a key, returned at every token with that key.
  const totals = (keys, x, counted) => {
    const sums = new Map();
    keys.forEach((key, i) => sums.set(key, (sums.get(key) ?? 0) + (counted[i] ? at(x, i) : 0)));
    return keys.map((key) => sums.get(key));
  };
  const counts = (keys) => totals(keys, 1, mask()).map((count) => Math.max(count, 1));
  const all = Array(size).fill(true);
  const overKeys = (keys, x, mean) => {
    const counted = mask(),
      by = mean ? counts(keys) : Array(size).fill(1);
    const value = totals(keys, x.value, counted).map((total, i) => total / by[i]);
    const back = (g) =>
      totals(
        keys,
        g.map((slope, i) => slope / by[i]),
        all,
      ).map((total, i) => (counted[i] ? total : 0));
    return record(value, [[x, back]]);
  };
  const overAll = (x, mean) => {
    const counted = mask(),
      by = mean ? count(step.row.map((_, i) => i)) : 1;
    const value = step.row.reduce((sum, _, i) => sum + (counted[i] ? at(x.value, i) : 0), 0) / by;
    return record(value, [[x, (g) => step.row.map((_, i) => (counted[i] ? g / by : 0))]]);
  };
  // How many keys have a token in the mask; 1 if none has.
  const count = (keys) => Math.max(new Set(keys.filter((_, i) => mask()[i])).size, 1);
  // The unbroken run of the mask that each token stands in.
  const runs = () => {
    let run = 0,
      last = null;
    return step.row.map((row, i) => {
      if (!mask()[i]) return -1;
      const follows = step.row[last] === row && step.column[last] === step.column[i] - 1;
      if (last === null || !follows) run++;
      last = i;
      return run;
    });
  };
  const anyOf = (keys, test) => totals(keys, test.map(Number), mask()).map((total) => total > 0);
  const allOf = (keys, test) =>
    anyOf(
      keys,
      test.map((x) => !x),
    ).map((x) => !x);
  const largest = (x) =>
    step.row.map((row) =>
      x.reduce(
        (most, v, i) => (step.row[i] === row && mask()[i] ? Math.max(most, v) : most),
        -Infinity,
      ),
    );
  const kthLargest = (x, k) => {
    const ordered = x.filter((_, i) => mask()[i]).sort((a, b) => (a < b ? 1 : a > b ? -1 : 0));
    return ordered.length ? ordered[Math.min(Math.trunc(k), ordered.length) - 1] : 0;
  };
  const budgetBound = (x, budget) => {
    const ordered = x.filter((_, i) => mask()[i]).sort((a, b) => a - b);
    let total = 0;
    const over = ordered.findIndex((v, i) => (total += v) >= budget * (i + 1));
    return over < 0 ? Infinity : ordered[over];
  };
  const futureSum = (x, gamma) => {
    const later = new Map();
    const sums = step.row.map(() => 0);
    for (let i = size - 1; i >= 0; i--) {
      if (!mask()[i]) continue;
      sums[i] = at(x, i) + gamma * (later.get(step.row[i]) ?? 0);
      later.set(step.row[i], sums[i]);
    }
    return sums;
  };
  const words = {
    sg: (x) => leaf(x.value),
    seq_sum: (x) => overKeys(step.row, x, false),
    seq_mean: (x) => overKeys(step.row, x, true),
    run_mean: (x) => overKeys(runs(), x, true),
    sum: (x) => overAll(x, false),
    token_mean: (x) => overAll(x, true),
    seq_max: (x) => leaf(largest(x.value)),
    seq_any: (x) => leaf(anyOf(step.row, x.value)),
    seq_all: (x) => leaf(allOf(step.row, x.value)),
    run_all: (x) => leaf(allOf(runs(), x.value)),
    kth_largest: (x, k) => leaf(kthLargest(x.value, k.value)),
    budget_bound: (x, b) => leaf(budgetBound(x.value, b.value)),
    future_sum: (x, g) => leaf(futureSum(x.value, g.value)),
    draw: (seed, ...keys) =>
      leaf(
        each(
          size,
          [seed, ...keys].map((x) => x.value),
          draw,
        ),
      ),
  };
  const known = {
    N: () => count(step.row.map((_, i) => i)),
    B: () => count(step.row),
    G: () => count(step.group),
    L: () => counts(step.row),
    N_group: () => counts(step.group),
    inf: () => Infinity,
    weights: () => 1, // every token of the page has the weight 1
    L_turn: () => counts(runs()),
    K: () => {
      const shares = counts(runs()).map((length) => 1 / length);
      return totals(step.row, shares, mask());
    },
  };
  Object.assign(known, { n: known.N, b: known.B, W: known.N });

  const valueOf = (x) => {
    if (typeof x === "string") {
      if (names.has(x)) return names.get(x);
      if (Object.hasOwn(known, x)) return leaf(known[x]());
      throw new Error(`the formula reads ${x}, which this page does not have`);
    }
    if (!Array.isArray(x)) return leaf(x);
    const [operator, ...rest] = x,
      nodes = rest.map(valueOf);
    // A bound on one side is a clip, whose slope is 1 at the bound.
    if (["max", "min"].includes(operator) && !nodes[1].carries) {
      const sides = { max: [nodes[1], leaf(Infinity)], min: [leaf(-Infinity), nodes[1]] };
      return pointwise(SMOOTH.clip, [nodes[0], ...sides[operator]]);
    }
    if (Object.hasOwn(SMOOTH, operator)) return pointwise(SMOOTH[operator], nodes);
    if (Object.hasOwn(TESTS, operator)) {
      return leaf(
        each(
          size,
          nodes.map((node) => node.value),
          TESTS[operator],
        ),
      );
    }
    if (Object.hasOwn(words, operator)) return words[operator](...nodes);
    throw new Error(`this page cannot compute ${operator}`);
  };
  for (const [name, expression] of lines) names.set(name, valueOf(expression));

  const result = names.get(of);
  result.slope = Array.isArray(result.value) ? result.value.map(() => 1) : 1;
  const plus = (a, b) => {
    if (a === null) return b;
    return Array.isArray(a) ? a.map((v, i) => v + at(b, i)) : a + b;
  };
  for (const node of tape.reverse()) {
    if (node.slope === null) continue;
    for (const [parent, back] of node.parents) parent.slope = plus(parent.slope, back(node.slope));
  }
  const gradient = (name) => names.get(name).slope ?? Array(size).fill(0);
  return { value: (name) => names.get(name)?.value, has: (name) => names.has(name), gradient };
}

// splitmix64 over the bits as float32: the word `draw`.
const MASK63 = 0x7fffffffffffffffn;
function draw(seed, ...keys) {
  const wrap = (z) => BigInt.asIntN(64, z),
    bits = new DataView(new ArrayBuffer(4));
  let z = BigInt(seed) * 0x9e3779b9n + 0x1234567n;
  for (const key of keys) {
    bits.setFloat32(0, key);
    z = wrap(z ^ (BigInt(bits.getInt32(0)) + 0x5851f42d4c957f2dn));
    z = wrap((z ^ ((z >> 30n) & 0x3ffffffffn)) * -0x40a7b892e31b1a47n);
    z = wrap((z ^ ((z >> 27n) & 0x1fffffffffn)) * -0x6b2fb644ecceee15n);
    z ^= (z >> 31n) & 0x1ffffffffn;
  }
  return z & MASK63;
}

// The value of an expression without names; null if it has any.
function constant(x) {
  if (typeof x === "number") return x;
  if (!Array.isArray(x) || !Object.hasOwn(SMOOTH, x[0])) return null;
  const values = x.slice(1).map(constant);
  return values.includes(null) ? null : SMOOTH[x[0]][0](...values);
}

// A bound at infinity binds nothing, and is left out.
function withoutIdleBounds(x) {
  if (!Array.isArray(x)) return x;
  const [operator, first, ...bounds] = x;
  if (operator === "clip") {
    const [low, high] = bounds.map(constant);
    if (low === -Infinity) return withoutIdleBounds(["min", first, bounds[1]]);
    return high === Infinity ? ["max", first, bounds[0]] : x;
  }
  const idle = { min: Infinity, max: -Infinity }[operator];
  return idle !== undefined && constant(bounds[0]) === idle ? first : x;
}

// The expression at a place of the list of nodes. parameters: the numbers behind "$". names: other
// names, or expressions, for some names.
function expressionAt(place, parameters = {}, names = {}) {
  const node = DATA.nodes[place];
  if (Array.isArray(node)) {
    return withoutIdleBounds([
      node[0],
      ...node.slice(1).map((i) => expressionAt(i, parameters, names)),
    ]);
  }
  if (typeof node !== "string") return node;
  if (!node.startsWith("$")) return Object.hasOwn(names, node) ? names[node] : node;
  return parameters[node.slice(1)];
}

const PRECEDENCE = { "|": 2, "&": 3, "+": 4, "-": 4, "*": 5, "/": 5, negative: 6, "~": 6, "**": 7 };
for (const sign of ["<", "<=", ">", ">=", "==", "!="]) PRECEDENCE[sign] = 1;

// A number as Python writes it.
function numberText(x) {
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return String(x);
  const [digits, power] = x.toExponential().split("e"),
    e = Number(power);
  if (e >= -4 && e < 16) return String(x);
  return `${digits}e${e < 0 ? "-" : "+"}${String(Math.abs(e)).padStart(2, "0")}`;
}

// The text of an expression, in brackets if it binds weaker than `least`.
function expressionText(x, least = 0) {
  let text = String(x),
    binds = 8;
  if (typeof x === "number") {
    text = numberText(x);
    if (text.startsWith("-")) binds = 6;
  } else if (typeof x === "boolean") {
    text = x ? "True" : "False";
  } else if (Array.isArray(x)) {
    const [operator, ...rest] = x;
    binds = PRECEDENCE[operator] ?? 8;
    if (binds === 8) {
      text = `${operator}(${rest.map((y) => expressionText(y)).join(", ")})`;
    } else if (rest.length === 1) {
      text = (operator === "negative" ? "-" : operator) + expressionText(rest[0], 6);
    } else {
      const left = expressionText(rest[0], binds + (binds === 7 || binds === 1 ? 1 : 0));
      text = `${left} ${operator} ${expressionText(rest[1], binds === 7 ? 6 : binds + 1)}`;
    }
  }
  return binds < least ? `(${text})` : text;
}
