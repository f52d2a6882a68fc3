// The token view: one completion as boxes, coloured by a number of the token; hover or focus shows all of them.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const code = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
const readable = (text) => text.replace(UNSEEN, code);
const boxed = (text) => readable(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "·".repeat(s.length)) || "∅";
const minus = (a, b) => (a === null || b === null ? null : a - b);
const COLOURS = {
  ratio: { name: "ratio", of: (r, i) => (r.ratio[i] > 0 ? Math.log(r.ratio[i]) : null), show: (v) => `×${short(Math.exp(v), 3)}` },
  advantage: { name: "advantage", of: (r, i) => r.token_advantage[i], show: (v) => short(v, 3) },
  clip: { name: "clip state", of: (r, i) => r.clipped[i] },
  rollout: { name: "logp − rollout_logp", of: (r, i) => minus(r.logp[i], r.rollout_logp[i]), show: (v) => short(v, 3) },
};
const HELD = { above: "held, advantage above 0", below: "held, advantage below 0", other: "held" };

// A held token gets no gradient. Which way it was pushed is sure; by which bound it was held is the loss's own business.
function held(row, i) {
  const advantage = row.token_advantage[i];
  return advantage > 0 ? "above" : advantage < 0 ? "below" : "other";
}

function rowsAt() {
  const run = DATA.runs[state.run], steps = [...new Set(run.rollouts.map((r) => r.step))];
  const step = steps.length ? steps[closest(steps, state.step ?? steps[steps.length - 1])] : null;
  return { steps, step, rows: run.rollouts.filter((r) => r.step === step) };
}

function paint(box, row, i) {
  const value = COLOURS[state.color].of(row, i);
  if (value === null || value === undefined) return box.classList.add("unknown");
  if (state.color === "clip") return void (value && box.classList.add(`held-${held(row, i)}`));
  const strength = Math.min(1, Math.abs(value) / DATA.scales[state.color]);
  box.style.background = `color-mix(in oklab, var(--${value < 0 ? "minus" : "plus"}) ${(100 * strength).toFixed(0)}%, var(--cell))`;
}

function showToken(row, i) {
  const list = $("token-values");
  list.replaceChildren();
  if (!row || i < 0 || i >= row.tokens.length) return;
  const known = (v) => (v === null || v === undefined ? "unknown" : short(v, 6));
  const facts = {
    token: JSON.stringify(row.tokens[i]).replace(UNSEEN, code), id: row.ids[i] ?? "unknown", position: `${i + 1} of ${row.tokens.length}`, ratio: known(row.ratio[i]), advantage: known(row.token_advantage[i]),
    clipped: row.clipped[i] === null ? "unknown" : row.clipped[i] ? HELD[held(row, i)] : "no", logp: known(row.logp[i]), old_logp: known(row.old_logp[i]),
    rollout_logp: known(row.rollout_logp[i]), "logp − rollout_logp": known(minus(row.logp[i], row.rollout_logp[i])),
  };
  for (const [name, value] of Object.entries(facts)) { add(list, "dt", {}, name); add(add(list, "dd"), "bdi", {}, value); }
}

function drawLegend() {
  const legend = $("token-legend"), { name, show } = COLOURS[state.color], limit = DATA.scales[state.color];
  legend.replaceChildren();
  if (state.color === "clip") {
    for (const [kind, text] of Object.entries({ free: "not held", above: HELD.above, below: HELD.below })) { add(legend, "span", { class: `token held-${kind}` }, text); legend.append(" "); }
    return;
  }
  add(legend, "span", {}, `${name}: ${show(-limit)} `);
  add(legend, "span", { class: "ramp" });
  add(legend, "span", {}, ` ${show(limit)} (one scale for all runs; stronger values get the full colour) `);
  add(legend, "span", { class: "token clipped" }, "underlined");
  add(legend, "span", {}, " held: no gradient");
}

function source(row) {
  const engine = DATA.runs[state.run].engine;
  return row.weights === null ? "" : ` · sampled ${engine ? `by ${engine} ` : ""}with the weights of step ${row.weights}`;
}

function fill(select, entries, chosen) {
  select.replaceChildren();
  for (const [value, text] of entries) add(select, "option", { value }, text);
  select.value = chosen;
}

function drawTokens() {
  if (!$("run")) return;
  const { steps, step, rows } = rowsAt();
  state.sample = Math.max(0, Math.min(state.sample, rows.length - 1));
  fill($("run"), DATA.runs.map((run, i) => [i, run.label + (run.rollouts.length ? "" : " (no rollouts)")]), state.run);
  fill($("step"), steps.map((s) => [s, s]), step);
  fill($("sample"), rows.map((r, i) => [i, `${i + 1} of ${rows.length} · reward ${short(r.reward, 3)} · ${r.tokens.length} tokens${r.finished === false ? " · cut" : ""}`]), state.sample);
  fill($("color"), Object.entries(COLOURS).map(([id, { name }]) => [id, name]), state.color);
  const row = rows[state.sample], list = $("token-list");
  list.replaceChildren();
  if (row && !row.tokens.length) list.textContent = readable(row.completion); // stored without its tokens
  $("prompt").textContent = row ? readable(row.prompt) : "";
  $("answer").textContent = row ? readable(row.answer) : "";
  $("facts").textContent = row ? `reward ${short(row.reward)} · advantage ${short(row.advantage)} · ${row.clipped.filter(Boolean).length} of ${row.tokens.length} tokens held${source(row)}` : "";
  state.token = Math.max(0, Math.min(state.token, (row?.tokens.length ?? 1) - 1));
  row?.tokens.forEach((text, i) => {
    const box = add(list, "span", { class: row.clipped[i] ? "token clipped" : "token", role: "option", tabindex: i === state.token ? 0 : -1, "data-i": i, "aria-selected": i === state.token });
    add(box, "bdi", {}, boxed(text));
    paint(box, row, i);
    if (text.includes("\n")) add(list, "br");
  });
  drawLegend();
  showToken(row, state.token);
}

function chooseToken(i, focus) {
  const boxes = $("token-list").querySelectorAll(".token");
  if (!boxes.length) return;
  boxes[state.token]?.setAttribute("tabindex", -1);
  boxes[state.token]?.setAttribute("aria-selected", false);
  state.token = Math.max(0, Math.min(i, boxes.length - 1));
  boxes[state.token].setAttribute("tabindex", 0);
  boxes[state.token].setAttribute("aria-selected", true);
  if (focus) boxes[state.token].focus();
  showToken(rowsAt().rows[state.sample], state.token);
}

function startTokens() {
  if (!$("run")) return;
  const list = $("token-list"), indexOf = (event) => Number(event.target.closest(".token")?.dataset.i ?? -1);
  const choose = (id, take) => $(id).addEventListener("change", (event) => { take(event.target.value); update(); });
  choose("run", (v) => { state.run = Number(v); });
  choose("step", (v) => { state.step = Number(v); state.sample = 0; });
  choose("sample", (v) => { state.sample = Number(v); });
  choose("color", (v) => { state.color = v; });
  $("previous").addEventListener("click", () => { state.sample -= 1; update(); });
  $("next").addEventListener("click", () => { state.sample += 1; update(); });
  list.addEventListener("pointerover", (event) => { if (indexOf(event) >= 0) showToken(rowsAt().rows[state.sample], indexOf(event)); });
  list.addEventListener("pointerleave", () => showToken(rowsAt().rows[state.sample], state.token));
  list.addEventListener("focusin", (event) => { chooseToken(indexOf(event)); save(); });
  list.addEventListener("click", (event) => { if (indexOf(event) >= 0) chooseToken(indexOf(event), true); });
  list.addEventListener("keydown", (event) => {
    const last = list.querySelectorAll(".token").length - 1;
    const to = { ArrowLeft: state.token - 1, ArrowUp: state.token - 1, ArrowRight: state.token + 1, ArrowDown: state.token + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    chooseToken(to, true);
  });
}
