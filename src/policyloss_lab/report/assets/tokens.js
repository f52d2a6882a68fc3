// The completions of the chosen group side by side: boxes for tokens, coloured by a number of the token; hover or focus
// shows all of them. A completion is built when it is seen, and a long one piece by piece.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const PIECE = 300, PRINTED = 2000;
const code = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
const readable = (text) => text.replace(UNSEEN, code);
const boxed = (text) => readable(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "·".repeat(s.length)) || "∅";
const minus = (a, b) => (a === null || b === null ? null : a - b);
// A column with one value for all tokens is stored as that value.
const at = (row, name, i) => (Array.isArray(row[name]) ? row[name][i] : row[name]) ?? null;
const plain = (v) => short(v, 3);
const COLOURS = {
  ratio: {
    name: "ratio", show: (v) => `×${short(Math.exp(v), 3)}`,
    of: (row, i) => (at(row, "ratio", i) > 0 ? Math.log(at(row, "ratio", i)) : null),
    says: "Orange: the policy makes the token likelier than it was when the step began. Blue: less likely.",
  },
  advantage: {
    name: "advantage", show: plain, of: (row, i) => at(row, "token_advantage", i),
    says: "Orange: better than expected, so the token is made likelier. Blue: worse, so it is made less likely.",
  },
  clip: { name: "branch of the loss", of: (row, i) => at(row, "branch", i), says: "What the loss did with each token." },
  entropy: {
    name: "entropy", show: plain, one: true, of: (row, i) => at(row, "entropy", i),
    says: "How unsure the policy is where it chose the token, in nats. Stronger: less sure.",
  },
  surprise: {
    name: "surprise", show: plain, one: true, of: (row, i) => minus(0, at(row, "rollout_logp", i) ?? at(row, "logp", i)),
    says: "How unlikely the token was when it was sampled: −log of its probability. Stronger: less likely.",
  },
  mismatch: {
    name: "mismatch of trainer and sampler", show: plain,
    of: (row, i) => minus(at(row, "old_logp", i) ?? at(row, "logp", i), at(row, "rollout_logp", i)),
    says: "old_logp − rollout_logp: the same weights on two engines, so it should be near 0. Orange: the trainer finds it likelier.",
  },
  ref: {
    name: "KL to the reference", show: plain, of: (row, i) => minus(at(row, "logp", i), at(row, "ref_logp", i)),
    says: "logp − ref_logp, whose mean estimates the KL. Orange: likelier than under the reference model. Blue: less likely.",
  },
  teacher: {
    name: "KL to the teacher", show: plain, of: (row, i) => minus(at(row, "logp", i), at(row, "teacher_logp", i)),
    says: "logp − teacher_logp, whose mean estimates the KL. Orange: likelier than under the teacher. Blue: less likely.",
  },
};
const ENDED = { end: "ended by itself", stop: "ended at a stop text", length: "cut at the length limit" };
const cards = []; // of the chosen group: {row, index, list, boxes, rest}
let seer = null; // watches the ends of what is built
let drawn = []; // what the view was last drawn from

// The colourings with a number for some token of the chosen group; if the chosen colouring is not among them, the first.
const offered = () => {
  const rows = groupsOf()[chosenGroup()]?.rows ?? [];
  const known = (row, of) => row.tokens.some((_, i) => of(row, i) !== null);
  return Object.entries(COLOURS).filter(([, { of }]) => rows.some((row) => known(row, of)));
};
const colouring = () => {
  const ids = offered().map(([id]) => id);
  return ids.includes(state.color) ? state.color : ids[0] ?? "ratio";
};
const byTool = (row, i) => at(row, "turn_ids", i) === -1; // or by a user: the policy did not write it
const turnsOf = (row) => {
  const count = Math.max(...[row.turn_ids ?? -1].flat()) + 1;
  return count ? `${count} turn${count > 1 ? "s" : ""}` : "";
};
const branchName = (row, i) => DATA.branches[at(row, "branch", i)]?.[0];

function paint(box, row, i, mode = colouring()) {
  const value = COLOURS[mode].of(row, i), branch = branchName(row, i);
  box.className = "token";
  box.style.background = "";
  if (at(row, "clipped", i)) box.classList.add("clipped");
  if (byTool(row, i)) return box.classList.add("environment");
  if (branch === "masked" || branch === "rejected" || at(row, "mask", i) === false) box.classList.add(branch === "rejected" ? "rejected" : "masked");
  if (value === null) return box.classList.add("unknown");
  if (mode === "clip") return box.classList.add(`branch-${branch}`);
  const strength = Math.min(1, Math.abs(value) / DATA.scales[mode]);
  box.style.background = `color-mix(in oklab, var(--${value < 0 ? "minus" : "plus"}) ${(100 * strength).toFixed(0)}%, var(--cell))`;
  if (strength >= 0.5) box.classList.add(value < 0 ? "strong-minus" : "strong-plus");
}

function showToken(row, i) {
  const list = $("token-values");
  list.replaceChildren();
  $("token-branch").textContent = "";
  if (!row || i < 0 || i >= row.tokens.length) return;
  const branch = DATA.branches[at(row, "branch", i)], clipped = at(row, "clipped", i);
  const facts = { token: JSON.stringify(row.tokens[i]).replace(UNSEEN, code), id: at(row, "ids", i), position: `${i + 1} of ${row.tokens.length}`, turn: byTool(row, i) ? "the environment's" : at(row, "turn_ids", i) === null ? null : `${at(row, "turn_ids", i) + 1}`, branch: branch?.[1][0] ?? null };
  if (clipped !== null) facts["policy gradient"] = clipped ? "none" : at(row, "token_advantage", i) > 0 ? "up" : at(row, "token_advantage", i) < 0 ? "down" : "none";
  if (branch?.[0] === "masked" || branch?.[0] === "rejected") facts["policy gradient"] = "none";
  for (const [name, column] of Object.entries({ ratio: "ratio", advantage: "token_advantage", logp: "logp", old_logp: "old_logp", rollout_logp: "rollout_logp", ref_logp: "ref_logp", teacher_logp: "teacher_logp", entropy: "entropy" })) facts[name] = at(row, column, i);
  Object.assign(facts, { "old_logp − rollout_logp": COLOURS.mismatch.of(row, i), "logp − ref_logp": COLOURS.ref.of(row, i), "logp − teacher_logp": COLOURS.teacher.of(row, i) });
  for (const [name, value] of Object.entries(facts)) {
    if (value === null) continue;
    add(list, "dt", {}, name);
    add(add(list, "dd"), "bdi", {}, typeof value === "number" ? short(value, 6) : value);
  }
  $("token-branch").textContent = branch?.[1][1] ?? "";
}

function drawLegend() {
  const legend = $("token-legend"), mode = colouring(), { show, one, says } = COLOURS[mode], limit = DATA.scales[mode];
  const present = new Set(cards.flatMap(({ row }) => row.tokens.map((_, i) => (byTool(row, i) ? null : branchName(row, i)))));
  const sample = (kind, text, after) => { add(legend, "span", { class: `token ${kind}` }, text); add(legend, "span", {}, after); };
  legend.replaceChildren();
  add(legend, "span", {}, `${says} `);
  if (mode === "clip") {
    for (const [name, [words]] of DATA.branches) if (present.has(name)) sample(`branch-${name} ${name}`, words, " ");
  } else if (limit !== undefined) {
    add(legend, "span", {}, one ? "0 " : `${show(-limit)} `);
    add(legend, "span", { class: one ? "ramp one" : "ramp" });
    add(legend, "span", {}, ` ${show(limit)} `);
    sample("strong-plus", "marked", one ? " strong. " : " strong, with its sign. ");
    if (present.has("rejected")) sample("rejected", "struck", " rejected by the rollout correction. ");
    if (present.has("masked")) sample("masked", "dashed", " not trained on. ");
  }
  if (cards.some(({ row }) => [row.turn_ids].flat().includes(-1))) sample("environment", "inverse", " written by the environment, between two turns. ");
  if (cards.some(({ row }) => [row.clipped].flat().includes(true))) sample("clipped", "underlined", " held by the trust region: no gradient.");
}

function fill(select, entries, chosen) {
  select.replaceChildren();
  for (const [value, text] of entries) add(select, "option", { value }, text);
  select.value = chosen;
}

// Build the tokens of a card up to one of them; the rest is built when its end is visible.
function build(card, upTo) {
  const { row, list, boxes, rest } = card, to = Math.min(row.tokens.length, upTo), mode = colouring();
  for (let i = boxes.length; i < to; i++) {
    const box = document.createElementNS(list.namespaceURI, "span");
    for (const [name, value] of Object.entries({ role: "option", tabindex: i === 0 ? 0 : -1, "data-i": i, "aria-selected": false, "aria-posinset": i + 1, "aria-setsize": row.tokens.length })) box.setAttribute(name, value);
    add(box, "bdi", {}, boxed(row.tokens[i]));
    paint(box, row, i, mode);
    boxes.push(box);
    rest.before(box);
    if (row.tokens[i].includes("\n")) rest.before(document.createElement("br"));
  }
  if (boxes.length < row.tokens.length) return;
  seer?.unobserve(rest);
  rest.remove();
}

function ended(row) {
  return Object.hasOwn(ENDED, row.finish_reason ?? "") ? ENDED[row.finish_reason] : row.finish_reason ?? (row.finished === null ? "" : row.finished ? "ended" : ENDED.length);
}

function drawCard(parent, row, index) {
  const card = add(parent, "article", { class: "completion" }), head = add(card, "header");
  add(head, "b", {}, `reward ${short(row.reward, 3)}`);
  const facts = [row.advantage === null ? "" : `advantage ${short(row.advantage, 3)}`, row.tokens.length ? `${row.tokens.length} token${row.tokens.length > 1 ? "s" : ""}` : "", turnsOf(row), readable(ended(row))].filter(Boolean).join(" · ");
  add(head, "span", { class: "quiet" }, ` · ${facts}`);
  if (!row.tokens.length) return void add(card, "p", { class: "answer-text", dir: "auto" }, readable(row.completion));
  const list = add(card, "div", { class: "tokens", role: "listbox", "aria-orientation": "horizontal", "data-card": cards.length, "aria-label": `Completion ${index + 1}: reward ${short(row.reward, 3)}, ${facts}; arrow keys move` });
  const rest = add(list, "span", { class: "rest" }, "…");
  cards.push({ row, index, list, boxes: [], rest });
  seer.observe(rest);
}

function drawTokens() {
  if (!$("run")) return;
  const place = chosenGroup(), group = groupsOf()[place], box = $("completions"), focused = box.contains(document.activeElement);
  const wanted = [DATA.runs[state.run], ...["step", "group", "sample", "token", "color", "find", "show", "sort", "only"].map((name) => state[name])];
  if (wanted.every((value, i) => value === drawn[i])) return;
  drawn = wanted;
  drawGroups();
  fill($("color"), offered().map(([id, { name }]) => [id, name]), colouring());
  $("color").parentElement.hidden = $("token-legend").hidden = !offered().length;
  document.querySelector(".token-view").classList.toggle("texts", !group?.rows.some((row) => row.tokens.length));
  drawHistory(group);
  box.replaceChildren();
  cards.length = 0;
  seer?.disconnect();
  seer = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      const card = cards.find((other) => other.rest === target);
      if (!isIntersecting || !card) continue;
      build(card, card.boxes.length + PIECE);
      seer.unobserve(target); // to be told again if its end can still be seen
      if (target.isConnected) seer.observe(target);
    }
  }, { rootMargin: "300px" });
  $("group").hidden = !group;
  if (!group) return showToken(null, 0); // a run without completions beside one that has some
  const source = group.rows[0].weights, engine = DATA.runs[state.run].engine;
  $("group-title").textContent = `Step ${short(group.step, 9)}${group.held_out ? " · held-out prompt" : ""}`;
  $("group-facts").textContent = [
    group.rows.length > 1 ? `${group.rows.length} completions · mean reward ${short(group.reward, 3)} · spread ${short(group.spread, 3)}` : "one completion",
    group.of === null ? "" : `one of ${group.of} groups of this step`,
    source === null ? "" : `sampled ${engine ? `by ${engine} ` : ""}with the weights of step ${source}`,
  ].filter(Boolean).join(" · ");
  $("prompt").textContent = readable(group.prompt);
  $("prompt").hidden = !group.prompt;
  $("expected").hidden = !group.answer;
  $("answer").textContent = readable(group.answer);
  group.rows.forEach((row, index) => drawCard(box, row, index));
  drawLegend();
  state.sample = Math.max(0, Math.min(state.sample, cards.length - 1));
  chooseToken(state.sample, state.token);
  if (focused) cards[state.sample]?.boxes[state.token].focus({ preventScroll: true });
}

function chooseToken(sample, i, focus) {
  const before = cards[state.sample]?.boxes[state.token], card = cards[sample];
  before?.setAttribute("aria-selected", false);
  if (!card) return showToken(null, 0);
  Object.assign(state, { sample, token: Math.max(0, Math.min(i, card.row.tokens.length - 1)) });
  build(card, Math.max(card.boxes.length, state.token + PIECE));
  for (const other of card.boxes) if (other.tabIndex === 0) other.tabIndex = -1;
  const box = card.boxes[state.token];
  box.tabIndex = 0;
  box.setAttribute("aria-selected", true);
  if (focus) box.focus();
  showToken(card.row, state.token);
}

function startTokens() {
  if (!$("run")) return;
  startGroups();
  const box = $("completions"), aimed = (event) => {
    const token = event.target.closest(".token"), list = event.target.closest(".tokens");
    return token && list ? [Number(list.dataset.card), Number(token.dataset.i)] : null;
  };
  $("color").addEventListener("change", (event) => {
    state.color = event.target.value;
    for (const { row, boxes } of cards) boxes.forEach((token, i) => paint(token, row, i, state.color));
    drawLegend();
    save();
  });
  box.addEventListener("pointerover", (event) => { const to = aimed(event); if (to) showToken(cards[to[0]].row, to[1]); });
  box.addEventListener("pointerleave", () => showToken(cards[state.sample]?.row, state.token));
  box.addEventListener("focusin", (event) => { const to = aimed(event); if (to) { chooseToken(...to); save(); } });
  box.addEventListener("click", (event) => { const to = aimed(event); if (to) chooseToken(...to, true); });
  box.addEventListener("keydown", (event) => {
    const to = aimed(event);
    if (!to) return;
    const [sample, i] = to, last = cards[sample].row.tokens.length - 1, down = Math.min(sample + 1, cards.length - 1);
    const aim = { ArrowLeft: [sample, i - 1], ArrowRight: [sample, i + 1], Home: [sample, 0], End: [sample, last], ArrowUp: [Math.max(0, sample - 1), i], ArrowDown: [down, i] }[event.key];
    if (!aim) return;
    event.preventDefault();
    chooseToken(...aim, true);
  });
  addEventListener("beforeprint", () => { for (const card of cards) build(card, PRINTED); });
}
