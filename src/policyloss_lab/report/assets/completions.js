// The table of groups: one line for a prompt at a step. Only lines that can be seen are in the page.
const LINE = 34, MARGIN = 8, HISTORY = 50, EXCERPT = 240;
const HEADS = [
  ["step", "Step", "the step of training"], ["", "Prompt", ""], ["", "Completion", ""], ["", "Rewards", ""],
  ["reward", "Mean", "the mean reward"], ["spread", "Spread", "the spread of the rewards"],
  ["length", "Tokens", "the mean length"], ["cut", "Cut", "how many were cut at the length limit"],
];
const SHOWN = {
  all: ["all prompts", () => true],
  differ: ["rewards that differ", (group) => group.spread > 0],
  equal: ["equal rewards", (group) => group.spread === 0 && group.rows.length > 1],
  cut: ["something cut short", (group) => group.cut > 0],
  held_out: ["held-out prompts", (group) => group.held_out],
  followed: ["seen at several steps", (group) => samePrompt(group).length > 1],
};
const groupsOf = () => DATA.runs[state.run].rollouts;
const remembered = new WeakMap(); // run → name → value, as long as the page has that run

// The result of `make` for the chosen run, cached by name.
function once(name, make) {
  const run = DATA.runs[state.run];
  if (!remembered.has(run)) remembered.set(run, new Map());
  const values = remembered.get(run);
  if (!values.has(name)) values.set(name, make());
  return values.get(name);
}

const promptOf = (group) => `${group.held_out} ${group.prompt}`;

// The groups of a run with the prompt of `group`, by step.
function samePrompt(group) {
  const by = once("prompts", () => {
    const groups = new Map();
    for (const other of groupsOf()) {
      if (!groups.has(promptOf(other))) groups.set(promptOf(other), []);
      groups.get(promptOf(other)).push(other);
    }
    return groups;
  });
  return by.get(promptOf(group));
}

// The index of the chosen group in the run: by step, and by its number in the step; by default the
// group with the greatest spread. −1 if there is none.
function chosenGroup() {
  const groups = groupsOf();
  if (!groups.length) return -1;
  const steps = once("steps", () => [...new Set(groups.map((group) => group.step))]);
  const step = steps[closest(steps, state.step ?? steps[steps.length - 1])];
  const first = groups.findIndex((group) => group.step === step), here = groups.filter((group) => group.step === step);
  state.group ??= here.reduce((best, group, i) => (group.spread > (here[best].spread ?? 0) ? i : best), 0);
  state.group = Math.max(0, Math.min(Math.trunc(state.group), here.length - 1));
  return first + state.group;
}

function openGroup(place) {
  const groups = groupsOf(), { step } = groups[place], moved = step !== state.step;
  Object.assign(state, { step, group: place - groups.findIndex((group) => group.step === step), sample: 0, token: 0 });
  if (moved) return update();
  drawTokens();
  save();
}

// The indices of the groups that match the search and the choices, in the chosen order.
function listed() {
  const words = state.find.toLowerCase(), shown = SHOWN[state.show] ? state.show : "all", sort = state.sort;
  return once(`list ${shown} ${state.only} ${sort} ${words}`, () => {
    const groups = groupsOf(), down = sort.startsWith("-") ? -1 : 1, key = sort.replace("-", "");
    const has = (text) => text.toLowerCase().includes(words);
    const fits = (group) => SHOWN[shown][1](group) && (state.only === null || group.step === state.only)
      && (!words || has(group.prompt) || has(group.answer) || group.rows.some((row) => has(row.completion)));
    const places = groups.map((_, i) => i).filter((i) => fits(groups[i]));
    if (!HEADS.some(([name]) => name && name === key)) return places;
    const value = (i) => groups[i][key] ?? -Infinity;
    return places.sort((a, b) => (value(a) < value(b) ? -down : value(a) > value(b) ? down : a - b));
  });
}

function drawHeads() {
  const line = document.querySelector("#groups .heads");
  line.replaceChildren();
  for (const [name, title, about] of HEADS) {
    const down = state.sort === `-${name}`, up = state.sort === name, sorted = down ? "descending" : up ? "ascending" : "none";
    const head = add(line, "span", { role: "columnheader", ...(name ? { "aria-sort": sorted } : {}) }, name ? undefined : title);
    if (!name) continue;
    const button = add(head, "button", { type: "button", title: `Sort by ${about}` }, `${title}${down ? " ▾" : up ? " ▴" : ""}`);
    button.addEventListener("click", () => { state.sort = down ? name : `-${name}`; $("groups").scrollTop = 0; drawTokens(); save(); });
  }
}

// The height of a reward's bar: 0 to 1 between the lowest and the highest reward of the run.
function level(reward) {
  const [low, high] = once("rewards", () => {
    const all = groupsOf().flatMap((group) => group.rows.map((row) => row.reward).filter((r) => r !== null));
    return [all.reduce((a, b) => Math.min(a, b), 0), all.reduce((a, b) => Math.max(a, b), 0)];
  });
  return high > low ? (reward - low) / (high - low) : 0;
}

function drawBars(parent, rewards) {
  const bars = add(parent, "span", { class: "bars", "aria-hidden": true });
  for (const reward of rewards.slice(0, 24)) add(bars, "i", reward === null ? { class: "unknown" } : {}).style.height = `${(15 + 85 * level(reward ?? 0)).toFixed(0)}%`;
}

function drawGroupLine(parent, list, i, chosen) {
  const group = groupsOf()[list[i]];
  const line = add(parent, "div", { class: "group-line", role: "row", "aria-rowindex": i + 2, "aria-selected": list[i] === chosen, tabindex: -1, "data-i": i });
  line.style.top = `${i * LINE}px`;
  add(line, "span", { role: "rowheader" }, short(group.step, 9));
  const prompt = add(line, "span", { role: "gridcell", class: "group-prompt" });
  if (group.held_out) add(prompt, "i", { class: "tag" }, "held-out");
  const oneLine = (text) => readable(text.slice(0, EXCERPT)).replace(/\s+/g, " ");
  add(prompt, "bdi", {}, oneLine(group.prompt));
  const { text, count, others } = mostFrequent(group), answer = add(line, "span", { role: "gridcell", class: "group-prompt" });
  add(answer, "bdi", {}, oneLine(text));
  if (others) add(answer, "i", { class: "quiet" }, ` ${count} of ${group.rows.length}`);
  drawBars(add(line, "span", { role: "gridcell", "aria-label": `${group.rows.length} completions` }), group.rows.map((row) => row.reward));
  for (const value of [short(group.reward, 3), short(group.spread, 3), short(group.length, 3), group.cut || "–"]) add(line, "span", { role: "gridcell" }, value);
  return line;
}

function drawLines() {
  const box = $("groups"), lines = $("group-lines"), list = listed(), chosen = chosenGroup();
  const focused = lines.contains(document.activeElement), first = Math.max(0, Math.floor(box.scrollTop / LINE) - MARGIN);
  const last = Math.min(list.length, Math.ceil((box.scrollTop + box.clientHeight) / LINE) + MARGIN);
  lines.replaceChildren();
  for (let i = first; i < last; i++) drawGroupLine(lines, list, i, chosen);
  if (!list.length) add(lines, "p", { class: "quiet" }, "Nothing fits this choice.");
  const stop = lines.querySelector("[aria-selected=true]") ?? lines.firstElementChild;
  stop?.setAttribute("tabindex", 0);
  if (focused) stop?.focus({ preventScroll: true });
}

// Scroll the table, and nothing else, until the chosen line is visible.
function revealLine() {
  const box = $("groups"), at = listed().indexOf(chosenGroup()) * LINE, room = box.clientHeight - 2 * LINE;
  if (at >= 0 && (at < box.scrollTop || at > box.scrollTop + room)) box.scrollTop = Math.max(0, at - room / 2);
}

function drawGroups() {
  const groups = groupsOf(), list = listed(), steps = [...new Set(groups.map((group) => group.step))];
  fill($("run"), DATA.runs.map((run, i) => [i, run.label + (run.rollouts.length ? "" : " (no completions)")]), state.run);
  fill($("only"), [["", "all steps"], ...steps.map((step) => [step, step])], state.only ?? "");
  const counts = Object.entries(SHOWN).map(([name, [words, test]]) => [name, words, once(`count ${name}`, () => groups.filter(test).length)]);
  fill($("show"), counts.filter(([name, , count]) => count || name === "all").map(([name, words, count]) => [name, `${words} (${count})`]), SHOWN[state.show] ? state.show : "all");
  if (document.activeElement !== $("find")) $("find").value = state.find;
  $("listed").textContent = list.length === groups.length ? "" : `${list.length} of ${groups.length} lines`;
  $("groups").setAttribute("aria-rowcount", list.length + 1);
  $("group-lines").style.height = `${Math.max(1, list.length) * LINE}px`;
  drawHeads();
  revealLine();
  drawLines();
}

// Where two texts differ: [the length of their common start, the length of their common end].
function ends(a, b) {
  let front = 0, back = 0;
  const shorter = Math.min(a.length, b.length);
  while (front < shorter && a[front] === b[front]) front++;
  while (back < shorter - front && a[a.length - 1 - back] === b[b.length - 1 - back]) back++;
  return [front, back];
}

function mostFrequent(group) {
  const counts = new Map();
  for (const { completion } of group.rows) counts.set(completion, (counts.get(completion) ?? 0) + 1);
  const [[text, count]] = [...counts].sort((a, b) => b[1] - a[1]);
  return { text, count, others: counts.size - 1 };
}

// A text of which only the part around the change is shown if it is long.
function drawChange(cell, text, before) {
  const [front, back] = before === null ? [text.length, 0] : ends(text, before);
  const from = Math.max(0, Math.min(front, text.length) - EXCERPT / 2), to = Math.min(text.length, Math.max(text.length - back, from) + EXCERPT / 2);
  const piece = (a, b) => readable(text.slice(a, b));
  const out = add(cell, "bdi", { class: "answer-text" });
  out.append(from > 0 && before !== null ? "…" : "", piece(before === null ? 0 : from, front === text.length ? Math.min(to, EXCERPT) : front));
  if (front < text.length - back) add(out, "mark", {}, piece(front, Math.min(text.length - back, front + EXCERPT)));
  if (front < text.length) out.append(piece(text.length - back, to));
  if (to < text.length) out.append("…");
  if (!text) add(out, "i", { class: "quiet" }, "empty");
}

function drawHistory(group) {
  const box = $("history"), all = group ? samePrompt(group) : [], body = box.querySelector("tbody");
  box.hidden = all.length < 2;
  body.replaceChildren();
  if (box.hidden) return;
  const every = Math.ceil(all.length / HISTORY), chosen = all.filter((_, i) => (all.length - 1 - i) % every === 0);
  let before = null;
  for (const other of chosen) {
    const line = add(body, "tr", other === group ? { "aria-current": "true" } : {}), { text, count, others } = mostFrequent(other);
    const button = add(add(line, "td"), "button", { type: "button", "aria-label": `Open step ${other.step}` }, short(other.step, 9));
    button.addEventListener("click", () => openGroup(groupsOf().indexOf(other)));
    const reward = add(line, "td", {}, `${short(other.reward, 3)} `);
    drawBars(reward, other.rows.map((row) => row.reward));
    add(line, "td", {}, short(other.length, 3));
    const cell = add(line, "td");
    drawChange(cell, text, before);
    if (other.rows.length > 1) add(cell, "span", { class: "quiet" }, ` ${count} of ${other.rows.length}${others ? `, and ${others} other${others > 1 ? "s" : ""}` : ""}`);
    before = text;
  }
}

function startGroups() {
  const redraw = () => { drawTokens(); save(); };
  const choose = (id, take) => $(id).addEventListener("change", (event) => { take(event.target.value); $("groups").scrollTop = 0; redraw(); });
  choose("run", (v) => { Object.assign(state, { run: Number(v), group: null, only: null, sample: 0, token: 0 }); });
  choose("show", (v) => { state.show = v; });
  choose("only", (v) => { state.only = v === "" ? null : Number(v); });
  let waiting;
  $("find").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.find = $("find").value; $("groups").scrollTop = 0; redraw(); }, 120);
  });
  const move = (by) => {
    const list = listed(), from = list.indexOf(chosenGroup());
    if (list.length) openGroup(list[Math.max(0, Math.min(list.length - 1, from < 0 ? 0 : from + by))]);
  };
  $("groups").addEventListener("scroll", drawLines, { passive: true });
  $("groups").addEventListener("click", (event) => {
    const line = event.target.closest("[data-i]");
    if (line) openGroup(listed()[Number(line.dataset.i)]);
  });
  $("group-lines").addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -8, PageDown: 8, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    move(by);
  });
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
}
