// The choice of visible runs: buttons for a few, a list with a search for many; and of highlighted runs.
const FEW = 8; // as many as there are colours

const isShown = (subject) => subject.runs.some((i) => !state.hidden.has(i));

function showRuns(list, visible) {
  for (const { runs } of list) for (const i of runs) visible ? state.hidden.delete(i) : state.hidden.add(i);
  update();
}

function nameOf(parent, subject) {
  add(parent, "i", { class: `swatch run${subject.runs[0] % 8}` });
  add(parent, "bdi", {}, subject.label);
}

// While the pointer or the focus is on a name, its lines are highlighted.
function highlightFrom(node, subject) {
  for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => hover(subject.runs[0]));
  for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => hover(null));
}

function drawRuns() {
  const all = subjects(), few = all.length <= FEW;
  $("chooser").hidden = few;
  if (few) $("chooser").open = false;
  const signature = JSON.stringify([state.bands, all.map((subject) => subject.label)]);
  if ($("legend").dataset.of !== signature) {
    $("legend").dataset.of = signature;
    $("legend").replaceChildren();
    $("choices").replaceChildren();
    for (const subject of all) few ? addButton(subject) : addChoice(subject);
    searchRuns();
  }
  const drawn = all.filter(isShown).length;
  $("chooser").querySelector("summary").textContent = `Runs: ${drawn} of ${all.length}${state.marked.size ? `, ${state.marked.size} highlighted` : ""}`;
  document.querySelectorAll("#legend button").forEach((button, i) => button.setAttribute("aria-pressed", isShown(all[i])));
  document.querySelectorAll("#choices li").forEach((item, i) => {
    item.querySelector("input").checked = isShown(all[i]);
    item.querySelector("button").setAttribute("aria-pressed", all[i].runs.some((j) => state.marked.has(j)));
  });
}

function addButton(subject) {
  const button = add($("legend"), "button", { type: "button" });
  nameOf(button, subject);
  button.addEventListener("click", () => showRuns([subject], !isShown(subject)));
  highlightFrom(button, subject);
}

function addChoice(subject) {
  const item = add($("choices"), "li"), label = add(item, "label"), box = add(label, "input", { type: "checkbox" });
  nameOf(label, subject);
  box.addEventListener("change", () => showRuns([subject], box.checked));
  const button = add(item, "button", { type: "button" }, "highlight");
  button.setAttribute("aria-label", `Highlight ${subject.label}`);
  button.addEventListener("click", () => {
    const marked = subject.runs.some((i) => state.marked.has(i));
    for (const i of subject.runs) marked ? state.marked.delete(i) : state.marked.add(i);
    update();
  });
  highlightFrom(item, subject);
}

const searched = () => subjects().filter(({ label }) => label.toLowerCase().includes($("search").value.toLowerCase()));

function searchRuns() {
  const kept = new Set(searched().map(({ label }) => label));
  document.querySelectorAll("#choices li").forEach((item) => { item.hidden = !kept.has(item.querySelector("bdi").textContent); });
}

function startRuns() {
  $("search").addEventListener("input", searchRuns);
  $("show-all").addEventListener("click", () => showRuns(subjects(), true));
  $("show-none").addEventListener("click", () => showRuns(subjects(), false));
  $("show-found").addEventListener("click", () => {
    const kept = searched();
    state.hidden = new Set(subjects().filter((s) => !kept.includes(s)).flatMap(({ runs }) => runs));
    showRuns(kept, true);
  });
  const seeds = DATA.groups.some(({ runs }) => runs.length > 1);
  $("bands-label").hidden = !seeds;
  $("bands").addEventListener("change", (event) => { state.bands = event.target.checked; state.base = ""; update(); });
  $("base-label").hidden = DATA.runs.length < 2;
  $("base").addEventListener("change", (event) => { state.base = event.target.value; update(); });
}

// The runs or groups that the others may be compared with.
function drawBases() {
  const entries = subjects().map((subject, i) => [`${state.bands ? "g" : "r"}${i}`, subject.label]);
  fill($("base"), [["", "nothing"], ...entries], entries.some(([value]) => value === state.base) ? state.base : (state.base = ""));
}
