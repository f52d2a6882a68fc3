// The page of `policyloss what-if`. Text reaches it through textContent only.
const KINDS = { sign: "By sign of the advantage", ratio: "By ratio to the old policy", position: "By place in the sequence", branch: "The on-policy gradient by branch" };
const THROUGH = { tokens: "each token a weight of its own", head: "through the weight of the head", parameters: "through all parameters" };
const CODES = Object.fromEntries(DATA.branch_codes.map((name, i) => [name, i])), LIMITED = new Set(["upper", "lower", "dual", "dropped"].map((name) => CODES[name]));
const state = { losses: starting(), sequence: mostChanged(), token: 0, cell: [0, 0], through: Object.keys(DATA.cosine).at(-1) };
const BRANCH_NAMES = Object.fromEntries(DATA.branch_codes.map((code, i) => [code, DATA.branches[i].name]));
const percent = (x) => `${(100 * x).toFixed(x && x < 0.0995 ? 1 : 0)} %`;
const THEMES = { system: "light", light: "dark", dark: "system" };
const chosen = () => state.losses.map((i) => DATA.losses[i]);

// The first loss, and the two others with a gradient that are least similar to it.
function starting() {
  const alike = DATA.cosine[Object.keys(DATA.cosine).at(-1)][0], others = DATA.losses.map((_, i) => i).filter((i) => i && DATA.losses[i].norm > 0);
  const [second = 0, third = 0] = others.sort((a, b) => alike[a] - alike[b]);
  return [0, second, third];
}

// The sequence that the first loss changes most.
function mostChanged() {
  const sizes = DATA.losses[0].change.map(Math.abs);
  return sizes.indexOf(Math.max(...sizes));
}

function swatch(parent, place) { add(parent, "i", { class: `swatch run${place}` }); }

// A bar of the length `share`. A signed one begins in the middle, and a share below 0 goes to the left.
function bar(parent, place, share, text, signed = false) {
  const cell = add(parent, "div", { class: `bar run${place}${signed ? " signed" : ""}` });
  const mark = add(add(cell, "div"), "i", share < 0 ? { class: "down" } : {});
  mark.style.width = `${(Math.abs(share) * (signed ? 50 : 100)).toFixed(1)}%`;
  add(cell, "span", {}, text);
}

function drawMasses() {
  const grid = $("masses");
  grid.replaceChildren();
  for (const [kind, title] of Object.entries(KINDS)) {
    const names = [...new Set(chosen().flatMap((loss) => Object.keys(loss.mass[kind] ?? {})))];
    if (!names.length) continue;
    const card = add(grid, "div", { class: "card" });
    add(card, "h3", {}, title);
    const table = add(card, "table");
    for (const name of names) {
      const row = add(table, "tr");
      add(row, "th", { scope: "row" }, kind === "branch" ? BRANCH_NAMES[name] : name);
      const cell = add(row, "td");
      chosen().forEach((loss, place) => bar(cell, place, loss.mass[kind][name] ?? 0, percent(loss.mass[kind][name] ?? 0)));
    }
  }
}
function tint(value) { return `color-mix(in oklab, var(--${value < 0 ? "minus" : "plus"}) ${(100 * Math.min(1, Math.abs(value))).toFixed(0)}%, var(--cell))`; }

function drawCosines() {
  const grid = $("cosines"), rows = DATA.cosine[state.through];
  grid.replaceChildren();
  grid.style.gridTemplateColumns = `max-content repeat(${rows.length}, 19px)`;
  const head = add(grid, "span", { role: "row" });
  head.style.display = "contents";
  add(head, "b");
  for (const loss of DATA.losses) add(head, "b", { role: "columnheader", class: "over" }, loss.name);
  rows.forEach((row, i) => {
    const line = add(grid, "span", { role: "row" });
    line.style.display = "contents";
    add(line, "b", { role: "rowheader" }, DATA.losses[i].name);
    row.forEach((value, j) => { const cell = add(line, "div", { role: "gridcell", "data-cell": `${i} ${j}`, "aria-label": `${DATA.losses[i].name} and ${DATA.losses[j].name}: ${short(value, 3)}` }); cell.style.background = tint(value ?? 0); });
  });
}

function showCosine(i, j) {
  const grid = $("cosines");
  state.cell = [Math.max(0, Math.min(DATA.losses.length - 1, i)), Math.max(0, Math.min(DATA.losses.length - 1, j))];
  for (const cell of grid.querySelectorAll('[aria-selected="true"]')) cell.removeAttribute("aria-selected");
  grid.querySelector(`[data-cell="${state.cell.join(" ")}"]`).setAttribute("aria-selected", "true");
  const [a, b] = state.cell.map((k) => DATA.losses[k].name);
  $("cosine-value").textContent = `${a} and ${b}: ${short(DATA.cosine[state.through][state.cell[0]][state.cell[1]], 3)}`;
}

function drawSequences() {
  const table = $("sequences"), most = Math.max(1e-300, ...chosen().flatMap((loss) => loss.change.map(Math.abs)));
  table.replaceChildren();
  const head = add(add(table, "thead"), "tr");
  for (const title of ["Sequence", "Reward", "Advantage", "Tokens"]) add(head, "th", { scope: "col", class: title === "Sequence" ? "" : "number" }, title);
  chosen().forEach((loss, place) => { const cell = add(head, "th", { scope: "col", class: "delta" }); swatch(cell, place); add(cell, "span", {}, loss.name); });
  const body = add(table, "tbody");
  DATA.sequences.forEach((sequence, s) => {
    const row = add(body, "tr", s === state.sequence ? { "aria-current": "true" } : {}), trained = sequence.advantage.filter((_, i) => sequence.mask[i]);
    const button = add(add(row, "th", { scope: "row" }), "button", { type: "button" }, `sequence ${s + 1}`);
    button.addEventListener("click", () => { state.sequence = s; state.token = 0; drawSequences(); drawTokens(); $("sequences").querySelectorAll("button")[s].focus(); });
    for (const value of [short(sequence.reward, 3), short(trained.reduce((a, b) => a + b, 0) / Math.max(1, trained.length), 3), trained.length]) add(row, "td", { class: "number" }, value);
    chosen().forEach((loss, place) => { const x = loss.change[s]; bar(add(row, "td"), place, x / most, `${x < 0 ? "−" : x > 0 ? "+" : ""}${short(Math.abs(x), 3)}`, true); });
  });
  if (DATA.left_out) add(add(body, "tr"), "td", { colspan: 7, class: "quiet" }, `${DATA.left_out} more sequences count in the numbers above and are not drawn.`);
}

function drawTokens() {
  const sequence = DATA.sequences[state.sequence], lines = $("token-lines");
  $("which").textContent = `Sequence ${state.sequence + 1}. Orange is raised, blue is lowered; each loss has its own scale. Underlined: at a bound of the trust region. Struck through: rejected.`;
  $("prompt").textContent = sequence.prompt;
  lines.replaceChildren();
  chosen().forEach((loss, place) => {
    const title = add(lines, "h3");
    swatch(title, place); add(title, "span", {}, loss.name);
    const line = add(lines, "div", { class: "line-of-tokens", role: "listbox", tabindex: "0", dir: "auto", "aria-label": `Tokens under ${loss.name}; arrow keys move` });
    sequence.texts.forEach((text, i) => {
      const branch = loss.branch[state.sequence][i], box = add(line, "span", { class: "token", role: "option", "data-token": i });
      add(box, "bdi", {}, text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "·".repeat(s.length)) || "∅");
      if (LIMITED.has(branch)) box.classList.add("clipped");
      if (branch === CODES.rejected) box.classList.add("rejected");
      if (branch === CODES.masked) box.classList.add("masked");
      box.style.background = tint((loss.push[state.sequence][i] ?? 0) / (loss.scale || 1));
    });
    line.addEventListener("pointerover", (event) => { const box = event.target.closest("[data-token]"); if (box) showToken(Number(box.dataset.token)); });
    line.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (move) { event.preventDefault(); showToken(state.token + move); }
    });
  });
  showToken(state.token);
}

function showToken(i) {
  const sequence = DATA.sequences[state.sequence], list = $("token-values");
  state.token = Math.max(0, Math.min(sequence.texts.length - 1, i));
  for (const box of document.querySelectorAll("[data-token]")) {
    if (Number(box.dataset.token) === state.token) box.setAttribute("aria-selected", "true");
    else box.removeAttribute("aria-selected");
  }
  list.replaceChildren();
  if (!sequence.texts.length) return;
  const k = state.token, facts = [["token", JSON.stringify(sequence.texts[k])], ["place", `${k + 1} of ${sequence.texts.length}`], ["advantage", short(sequence.advantage[k], 4)], ["logp", short(sequence.logp[k], 4)]];
  if (sequence.ratio) facts.push(["ratio", short(sequence.ratio[k], 4)]);
  for (const loss of chosen()) facts.push([loss.name, `push ${short(loss.push[state.sequence][k], 3)}, ${DATA.branches[loss.branch[state.sequence][k]].name}`]);
  for (const [name, value] of facts) { add(list, "dt", {}, name); add(add(list, "dd"), "bdi", {}, value); }
}

function draw() { drawMasses(); drawSequences(); drawTokens(); }

state.losses.forEach((_, place) => {
  const select = $(`loss${place}`);
  select.before(add(document.createElement("span"), "i", { class: `swatch run${place}` }));
  DATA.losses.forEach((loss, i) => add(select, "option", { value: i, title: loss.title }, loss.name));
  select.value = state.losses[place];
  select.addEventListener("change", () => { state.losses[place] = Number(select.value); draw(); });
});
for (const name of Object.keys(DATA.cosine)) add($("through"), "option", { value: name }, THROUGH[name]);
$("through").value = state.through;
$("through").addEventListener("change", () => { state.through = $("through").value; drawCosines(); });
$("cosines").addEventListener("pointerover", (event) => { if (event.target.dataset.cell) showCosine(...event.target.dataset.cell.split(" ").map(Number)); });
$("cosines").addEventListener("keydown", (event) => {
  const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (move) { event.preventDefault(); showCosine(state.cell[0] + move[0], state.cell[1] + move[1]); }
});
document.querySelectorAll(".side thead button").forEach((button, column) => button.addEventListener("click", () => {
  const body = document.querySelector(".side tbody"), down = button.parentNode.getAttribute("aria-sort") !== "descending", rows = [...body.rows];
  const value = (row) => { const x = parseFloat(row.cells[column].textContent); return Number.isNaN(x) ? (column ? -Infinity : row.cells[column].textContent) : x; };
  rows.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1));
  for (const other of document.querySelectorAll(".side thead th")) other.removeAttribute("aria-sort");
  button.parentNode.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}));
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = THEMES[root.dataset.theme ?? "system"];
  $("theme").textContent = `Theme: ${root.dataset.theme}`;
});
drawCosines();
draw();
